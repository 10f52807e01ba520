"""The pipeline: recipes, the DAG, the planner, and what executes or renders a plan. Imports no torch."""
