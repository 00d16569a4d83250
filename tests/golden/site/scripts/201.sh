#!/bin/sh
echo "of another cluster"
