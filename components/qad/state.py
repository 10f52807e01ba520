from components.training.state import Line, load_state, save_state  # noqa: D100, F401
