"""What comes after training: merge, generate, evaluate, model card, hub. Everything here starts from a finished run."""
