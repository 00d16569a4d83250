#!/bin/bash
#SBATCH --partition=gpu --gres=gpu:2
python train.py --epochs 10
