"""Where gradients go: the slots of a rank, assigned and pulled, and what `.grad` shows."""
