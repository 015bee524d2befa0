"""Parts of the stage `learn`: the state that its checkpoints store, and optional records."""
