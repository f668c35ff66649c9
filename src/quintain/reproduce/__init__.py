"""`quintain reproduce`: published experiments on this package's own trainers, set beside the published numbers."""
