#!/bin/bash
#SBATCH --job-name=relax
#SBATCH --ntasks=4
#SBATCH --time=02:00:00
# Relax the structure before the production run.
module load gromacs/2024.2
srun gmx mdrun -s relax.tpr
