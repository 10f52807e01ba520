"""What training stages share: one step over several processes, and the state that a killed run continues from."""
