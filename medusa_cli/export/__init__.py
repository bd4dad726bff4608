"""Export and import of drafters in the layouts of other programs."""
