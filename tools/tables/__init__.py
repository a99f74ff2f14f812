"""The tables of README.md and docs/measured.md, one file for each part of the project."""
