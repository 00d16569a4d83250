#!/bin/bash
srun ./small