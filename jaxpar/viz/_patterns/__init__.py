"""What each pattern of `table` folds, and terms that several of them are made of."""
