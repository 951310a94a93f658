"""The job of a model: its specification, a rank's part in it, and its memory."""
