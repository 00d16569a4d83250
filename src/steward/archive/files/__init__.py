"""The sink that keeps scripts as plain files, and what lies in its tree."""
