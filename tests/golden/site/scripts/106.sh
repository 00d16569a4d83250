#!/bin/bash
#SBATCH --array=1-3
./sweep --index "$SLURM_ARRAY_TASK_ID"
