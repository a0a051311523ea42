"""Settings of the papers on modelled hardware, beside what they state."""
