#!/bin/bash
module load gromacs/2024.2
srun gmx mdrun -s production.tpr
