"""Data: from files, Hub data sets and rows in memory to token rows with a loss, packed or not."""
