"""What a model is: its parameters and their names, its units, its wrappers, and hooks in it."""
