"""The explorer: a page that shows what a model sees in an image, and why."""
