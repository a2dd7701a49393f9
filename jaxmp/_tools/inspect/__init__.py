"""Reports which operations run in which dtype, from traced and compiled programs."""
