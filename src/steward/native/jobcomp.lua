-- Facts from the controller: one JSON line for each run of a job that ends, and
-- for each former size of one that is resized, appended to a file.
--
-- slurmctld runs this under JobCompType=jobcomp/lua, as jobcomp.lua beside its
-- slurm.conf, with Lua 5.1 to 5.4. A site with a jobcomp.lua of its own calls it:
--
--     local steward = dofile("/usr/lib/steward/jobcomp.lua")
--     function slurm_jobcomp_log_record(job)
--         steward.log_record(job)
--         ...
--         return slurm.SUCCESS
--     end
--
-- Lines go to the file that the global steward_jobcomp_file names before this is
-- loaded (or steward.file after it). slurmctld waits meanwhile and holds locks, so
-- that file must be on a local disk. Whatever a record holds, nothing is raised: a
-- line that cannot be written is lost, and the next one says how many were. A file of
-- 512 MiB is renamed to FILE.1, so that two of them are all that there ever is.

local steward = {}

-- Taken now: a site's script may change these for its own ends.
local byte, find, format = string.byte, string.find, string.format
local gsub, sub = string.gsub, string.sub
local concat = table.concat
local floor, huge = math.floor, math.huge
local open, rename, time = io.open, os.rename, os.time
local ipairs, pcall, rawget, rawset, type = ipairs, pcall, rawget, rawset, type

-- Raw, for a site's script may have globals that nobody may read before they are set.
steward.file = rawget(_G, "steward_jobcomp_file") or "/var/spool/steward/jobcomp.jsonl"
steward.most = rawget(_G, "steward_jobcomp_most") or 536870912 -- bytes of the file
steward.lost = 0

local LINE = 65536 -- bytes of a line at the most, its newline included
local NODES = 16384 -- bytes of a list at the most, as it stands in the line
local TEXT = 4096 -- bytes of any other text
local LOST_ROOM = 256 -- kept for what is said last

-- What Slurm gives: numbers first, so that no text can take their place.
local NUMBERS = {
	"job_id", "user_id", "group_id", "job_state", "resizing", "restart_cnt",
	"submit_time", "start_time", "end_time", "exit_code", "derived_ec",
	"array_job_id", "array_task_id", "het_job_id", "het_job_offset",
	"total_nodes", "total_cpus", "min_nodes", "max_nodes", "min_cpus", "max_cpus",
	"pn_min_cpus", "pn_min_memory", "time_limit", "time_min", "priority", "nice",
	"direct_set_prio", "site_factor", "delay_boot", "reboot", "req_switch",
	"wait4switch", "core_spec", "thread_spec", "segment_size",
}

local LISTS = { "nodes", "tres_fmt_alloc_str", "tres_fmt_req_str", "tres_alloc_str", "tres_req_str" }

-- Not asked for: script and spank_job_env, which are large; argv, comment and extra, in
-- which people put passwords, and which polls of the queue show; user_name, which Slurm does not know surely; qos_priority.
local TEXTS = {
	"sluid", "original_sluid", "origin_cluster", "account", "partition", "qos", "wckey",
	"resv_name", "name", "batch_host", "alloc_node", "work_dir", "admin_comment",
	"std_in", "std_out", "std_err", "features", "batch_features", "licenses", "container",
	"orig_dependency", "curr_dependency", "mcs_label", "gres_used", "burst_buffer",
	"tres_per_job", "tres_per_node", "tres_per_socket", "tres_per_task", "tres_bind", "tres_freq",
	"cpus_per_tres", "mem_per_tres", "selinux_context", "het_job_id_set",
}

local ESCAPES = { ['"'] = '\\"', ["\\"] = "\\\\", ["\n"] = "\\n", ["\t"] = "\\t", ["\r"] = "\\r" }

local function escaped(one)
	return ESCAPES[one] or format("\\u%04x", byte(one))
end

-- How many bytes the UTF-8 sequence at `at` has, and the least second byte it may have
-- and the greatest: no overlong form, no surrogate, nothing beyond U+10FFFF.
local function sequence(lead)
	if lead >= 194 and lead <= 223 then return 2, 128, 191 end
	if lead == 224 then return 3, 160, 191 end
	if lead == 237 then return 3, 128, 159 end
	if lead >= 225 and lead <= 239 then return 3, 128, 191 end
	if lead == 240 then return 4, 144, 191 end
	if lead >= 241 and lead <= 243 then return 4, 128, 191 end
	if lead == 244 then return 4, 128, 143 end
	return 0, 0, 0
end

local function is_sequence(text, at, size, least, most)
	local second = byte(text, at + 1)
	if not second or second < least or second > most then return false end
	for offset = 2, size - 1 do
		local next_byte = byte(text, at + offset)
		if not next_byte or next_byte < 128 or next_byte > 191 then return false end
	end
	return true
end

-- Bytes of which the first is not ASCII: those that are no UTF-8 become \xff in writing,
-- as Steward writes them of squeue's.
local function utf8_only(run)
	local parts, at = {}, 1
	while at <= #run do
		local lead = byte(run, at)
		local size, least, most = sequence(lead)
		if size > 0 and is_sequence(run, at, size, least, most) then
			parts[#parts + 1] = sub(run, at, at + size - 1)
			at = at + size
		else
			parts[#parts + 1] = format("\\\\x%02x", lead)
			at = at + 1
		end
	end
	return concat(parts)
end

local function escape(text)
	text = gsub(text, '[%z\1-\31"\\\127]', escaped)
	if find(text, "[\128-\255]") then text = gsub(text, "[\128-\255]+", utf8_only) end
	return text
end

-- A text as JSON of at most `room` bytes, and whether some of it had to go.
local function quoted(text, room)
	local kept = sub(text, 1, room - 2)
	local json = escape(kept)
	local is_cut = #kept < #text
	if #json > room - 2 then
		-- A byte becomes six at the most.
		json = escape(sub(kept, 1, floor((room - 2) / 6)))
		is_cut = true
	end
	return '"' .. json .. '"', is_cut
end

local function number(value)
	if value ~= value or value == huge or value == -huge then return nil end
	if value == floor(value) then return format("%.0f", value) end
	return format("%.6f", value)
end

local function given(job, field)
	local is_fine, value = pcall(function() return job[field] end)
	if is_fine then return value end
	return nil
end

-- Collects fields until a line is full.
local function writer()
	local parts, cut, left = {}, {}, LINE - LOST_ROOM
	local self = {}

	function self.add(field, json)
		parts[#parts + 1] = '"' .. field .. '":' .. json
		left = left - #field - #json - 4
	end

	function self.numbers(job)
		for _, field in ipairs(NUMBERS) do
			local value = given(job, field)
			if type(value) == "boolean" then value = value and 1 or 0 end
			local json = type(value) == "number" and number(value)
			if json and #json <= 32 then self.add(field, json) end
		end
	end

	function self.texts(job, fields, most)
		for _, field in ipairs(fields) do
			local value = given(job, field)
			if type(value) == "number" then value = number(value) end
			if type(value) == "string" and value ~= "" then
				-- Each name of a cut field takes its place in the line, too.
				local room = left - 2 * #field - 16
				if room > most then room = most end
				if room >= 64 then
					local json, is_cut = quoted(value, room)
					self.add(field, json)
					if is_cut then self.cut(field) end
				else
					self.cut(field)
				end
			end
		end
	end

	function self.cut(field)
		cut[#cut + 1] = '"' .. field .. '"'
		left = left - #field - 3
	end

	function self.line()
		if #cut > 0 then parts[#parts + 1] = '"cut":[' .. concat(cut, ",") .. "]" end
		return "{" .. concat(parts, ",") .. "}\n"
	end

	return self
end

local function line_of(job)
	local line = writer()
	line.add("v", "1")
	line.add("k", '"job"')
	line.add("t", number(time()))
	if steward.lost > 0 then line.add("lost", number(steward.lost)) end
	line.numbers(job)
	line.texts(job, LISTS, NODES)
	line.texts(job, TEXTS, TEXT)
	return line.line()
end

-- Whether the last line may have been written in part; nil until it is known what an
-- earlier slurmctld left, which may have died in the midst of one, or of a full disk.
local is_broken = nil

-- Whether the file may end in the midst of a line.
local function is_torn()
	local file, _, errno = open(steward.file, "rb")
	if not file then return errno ~= 2 end -- ENOENT: there is no line yet
	local size = file:seek("end")
	local is_inside = size ~= 0
	if is_inside and file:seek("end", -1) then is_inside = file:read(1) ~= "\n" end
	file:close()
	return is_inside
end

local function append(line)
	if is_broken == nil then is_broken = is_torn() end
	local file = open(steward.file, "a")
	if file and file:seek("end") >= steward.most then
		file:close()
		if not rename(steward.file, steward.file .. ".1") then return false end
		file, is_broken = open(steward.file, "a"), false
	end
	if not file then return false end
	-- One write, at the close: other processes may append to the file as well.
	file:setvbuf("full", LINE + 1)
	if is_broken then line = "\n" .. line end
	local is_written = file:write(line)
	local is_closed = file:close()
	is_broken = not (is_written and is_closed)
	return not is_broken
end

-- Append the line of a record; whether that went well. Raises nothing.
function steward.log_record(job)
	local is_fine, is_written = pcall(function() return append(line_of(job)) end)
	if is_fine and is_written then
		steward.lost = 0
		return true
	end
	steward.lost = steward.lost + 1
	return false
end

-- A site's own function, whether it comes before this or after, is the one that counts.
if not rawget(_G, "slurm_jobcomp_log_record") then
	rawset(_G, "slurm_jobcomp_log_record", function(job)
		steward.log_record(job)
		return 0 -- slurm.SUCCESS
	end)
end

-- slurmctld wants 0 of a script that it loads, and takes a table for it.
return steward
