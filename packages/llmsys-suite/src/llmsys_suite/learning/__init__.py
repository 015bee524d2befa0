"""Parts of the stage `learn`: its variant, its state in checkpoints, evaluation and records."""
