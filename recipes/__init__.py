"""Whole experiments as YAML files; a recipe holds every value that a run depends on."""
