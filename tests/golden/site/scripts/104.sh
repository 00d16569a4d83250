#!/bin/sh
export API_TOKEN=glpat-aaaaaaaaaaaaaaaaaaaaa
sleep 600
