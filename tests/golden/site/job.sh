#!/bin/bash
#SBATCH --account=physics
#SBATCH --partition=main
#SBATCH --ntasks=4
#SBATCH --mem=8G
#SBATCH --time=02:00:00
srun ./relax
