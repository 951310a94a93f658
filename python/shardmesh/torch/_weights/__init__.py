"""Where weights are and when: whole or by bucket, written by a program, loaded, or quantized."""
