"""Files sink: archives scripts and environments as plain files in a directory tree."""
