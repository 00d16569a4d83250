"""What a job may cost at the most, from what sbatch really sends."""
