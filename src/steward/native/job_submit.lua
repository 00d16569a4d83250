-- For a site without a job_submit.lua of its own; see docs/gate.md for one that has its own.
local steward = dofile("MODULE")
slurm_job_submit = steward.submit
slurm_job_modify = steward.modify
return slurm.SUCCESS
