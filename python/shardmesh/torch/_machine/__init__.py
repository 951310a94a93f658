"""The processes of a training: the service that they use, and the other ranks."""
