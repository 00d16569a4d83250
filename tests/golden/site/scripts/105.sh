#!/bin/bash
#SBATCH --nodes=2
module load cp2k
srun cp2k input.inp
