"""The tables of README.md and docs/, one file for each part of the project."""
