"""One file for each family of models: how its config.json is read and how its tensors are called."""
