"""From words and files to the parts of a run."""
