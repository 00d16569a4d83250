-- Asks Steward's gate whether a job can be paid: the same as the plugin job_submit_steward
-- in C, for sites that have a job_submit.lua and would rather not load a library.
--
-- A site's own job_submit.lua calls it at its end, when all that it changes is changed:
--
--     local steward = dofile("/usr/local/lib/steward/steward_gate.lua")
--     function slurm_job_submit(job_desc, part_list, submit_uid)
--         ...
--         return steward.submit(job_desc, part_list, submit_uid)
--     end
--     function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
--         ...
--         return steward.modify(job_desc, job_rec, part_list, modify_uid)
--     end
--
-- Lua 5.1 to 5.4, with LuaSocket; without it the site's policy holds for every job, and
-- slurmctld's log says so once. Nothing is raised, whatever happens. slurmctld runs one of
-- these at a time and holds locks meanwhile, so one deadline bounds the whole question, and
-- one that passes is followed by a while of not asking, which ends early where the answer
-- comes that was too late. steward_wire.lua lies beside it.

local steward = {}

-- Taken now: a site's script may change these for its own ends.
local find, format, gmatch = string.find, string.format, string.gmatch
local gsub, match = string.gsub, string.match
local concat, open, time = table.concat, io.open, os.time
local getenv, ipairs, pairs, pcall, require = os.getenv, ipairs, pairs, pcall, require
local rawget, tonumber, tostring, type = rawget, tonumber, tostring, type

local wire = dofile(match(debug.getinfo(1, "S").source, "^@(.*/)") .. "steward_wire.lua")
local given = wire.given

local SUCCESS, REFUSED = 0, 2050 -- slurm.SUCCESS, ESLURM_ACCOUNTING_POLICY
local NO_VAL, ANSWER_BYTES = 4294967294, 65536
local OVERSIZE = "This job cannot be priced: one of its lists is longer than Slurm accepts. "
	.. "Shorten it."
local DENIED = "Rejected, because the bank does not answer: try again in a minute."

-- Raw, for a site's script may have globals that nobody may read before they are set.
steward.cluster = rawget(_G, "steward_gate_cluster") or ""
steward.conf_path = rawget(_G, "steward_gate_conf") or getenv("STEWARD_GATE_CONF")
	or "/run/steward/gate.conf"

-- ---- The site's policy --------------------------------------------------------------------

local FORMAT = 1 -- of the file; also in gate_conf.c and plugin_conf.py
-- Policies while the gate does not answer: reject nothing, jobs that cannot be priced, every job.
local STRICTNESS = { observe = 0, allow = 1, deny = 2 }

local function defaults()
	return { socket = "/run/steward/gate.sock", off_file = "/run/steward/gate.off",
		timeout_s = 0.1, quiet_s = 10, rules = {}, default_partition = "" }
end

local conf = defaults()
conf.policy = "allow"

local function number_in(word, most)
	local value = find(word, "^[%d.]+$") and tonumber(word)
	return value and value <= most and value or nil
end

local function take_line(new, line)
	local words = {}
	for word in gmatch(gsub(line, "#.*", ""), "%S+") do words[#words + 1] = word end
	local name, value, policy = words[1], words[2], words[3]
	if not value then return end
	if name == "partition" and STRICTNESS[policy] then
		new.rules[value] = policy
	elseif name == "policy" and STRICTNESS[value] then
		new.policy = value
	elseif name == "format" then
		new.format = tonumber(value)
	elseif name == "socket" or name == "off_file" or name == "default_partition" then
		new[name] = value
	elseif name == "timeout_ms" then
		new.timeout_s = (number_in(value, 1000) or new.timeout_s * 1000) / 1000
	elseif name == "quiet_s" then
		new.quiet_s = number_in(value, 3600) or new.quiet_s
	end
end

-- Where the file is gone, what it said still holds: a daemon that ends may take it along. Of a
-- file of a newer format, only the policies hold, which every format states alike; other lines may
-- mean something else now: then the result is true.
local function follow_conf()
	local file = open(steward.conf_path, "r")
	if not file then return end
	local text = file:read(1048576)
	file:close()
	if not text then return end
	local new = defaults()
	for line in gmatch(text, "[^\r\n]+") do take_line(new, line) end
	if new.format and new.format > FORMAT then
		conf.policy, conf.rules = new.policy or conf.policy, new.rules
		return true
	end
	new.policy = new.policy or "allow"
	conf = new
end

local function exists(path)
	local file = open(path, "r")
	if file then file:close() end
	return file ~= nil
end

-- The name of the default partition, of those that slurmctld tells of.
local function default_partition(part_list)
	if conf.default_partition ~= "" or type(part_list) ~= "table" then
		return conf.default_partition
	end
	for name, part in pairs(part_list) do
		if given(part, "flag_default") == 1 then return name end
	end
	return ""
end

-- The strictest policy of the partitions of a job.
local function find_policy(names, part_list)
	if type(names) ~= "string" or names == "" then names = default_partition(part_list) end
	local strictest = "observe"
	for name in gmatch(names .. ",", "([^,]*),") do
		local policy = conf.rules[name] or conf.policy
		if STRICTNESS[policy] > STRICTNESS[strictest] then strictest = policy end
	end
	return strictest
end

-- ---- One question -------------------------------------------------------------------------

local quiet_until = 0 -- by the clock on the wall: Lua knows no other
local eased_at -- when a late answer ended such a while last
local late -- a connection on which an answer may yet come that nobody waits for
local is_said = false -- that the gate fails
local was_newer -- whether a newer Steward wrote the file when it was last read

-- LuaSocket's stream and its clock; nil and why not.
local function sockets()
	local is_fine, unix = pcall(require, "socket.unix")
	if not is_fine then return nil, "cannot be queried: LuaSocket is missing" end
	local _, core = pcall(require, "socket.core")
	local make = type(unix) == "table" and unix.stream or unix
	return make, type(core) == "table" and core.gettime or time
end

-- Receives up to a newline; nil if there is none in time, or in room.
local function receive_line(client, left)
	local parts, used = {}, 0
	while used <= ANSWER_BYTES do
		client:settimeout(left(), "t")
		local first = client:receive(1)
		if not first then return nil end
		client:settimeout(0, "t")
		local rest, _, partial = client:receive(8191)
		local got = first .. (rest or partial or "")
		parts[#parts + 1] = got
		used = used + #got
		if find(got, "\n", 1, true) then return used <= ANSWER_BYTES and concat(parts) or nil end
	end
	return nil
end

local function ask_once(client, line, left)
	client:settimeout(left(), "t")
	local is_there, reason = client:connect(conf.socket)
	local at = "at " .. conf.socket .. " "
	-- Without the path and the reason nobody finds a directory that is closed.
	if not is_there then return nil, at .. "is unreachable: " .. tostring(reason) end
	client:settimeout(left(), "t")
	if not client:send(line) then return nil, at .. "does not accept the request" end
	local text = receive_line(client, left)
	if not text then return nil, at .. "does not answer", true end
	local answer = wire.answer(text)
	if not answer then return nil, at .. "sent an invalid reply" end
	return answer
end

local function log(is_error, text)
	local slurm = rawget(_G, "slurm")
	if slurm then slurm[is_error and "log_error" or "log_info"]("%s", text) end
end

local function close(client)
	if client then pcall(function() client:close() end) end
end

-- Whether the answer has come that was too late for its job; never waits.
local function has_answered_late()
	if not late then return false end
	local is_fine, whole, why = pcall(function()
		late:settimeout(0, "t")
		return late:receive("*l")
	end)
	if is_fine and not whole and why == "timeout" then return false end
	close(late)
	late = nil
	return is_fine and whole ~= nil
end

-- Has nobody ask for a while: until the answer comes, unless one was late just before, too.
local function be_quiet(now, client)
	if client and eased_at and now >= eased_at and now - eased_at < conf.quiet_s then
		close(client)
		client = nil
	end
	close(late)
	late, quiet_until = client, now + conf.quiet_s
end

-- Whether nobody is to be asked.
local function is_quiet(now)
	-- The clock may have been set back.
	if now >= quiet_until or quiet_until - now > conf.quiet_s then return false end
	if not has_answered_late() then return true end
	eased_at, quiet_until = now, 0
	return false
end

-- An answer; or nil, and why there is none where somebody was asked.
local function ask(line)
	local make, clock = sockets()
	if not make then return nil, clock end
	local begun = clock()
	if is_quiet(begun) then return nil end
	local function left()
		-- LuaSocket takes zero for no waiting, and what is less for waiting for ever; what
		-- is there when this comes late itself is still taken.
		local rest = begun + conf.timeout_s - clock()
		return rest > 0.0001 and rest <= conf.timeout_s and rest or 0.0001
	end
	local is_made, client = pcall(make)
	if not is_made or not client then return nil, "is unreachable" end
	local is_fine, answer, why, is_asked = pcall(ask_once, client, line, left)
	if is_fine and answer then
		close(client)
		close(late)
		late = nil
		return answer
	end
	local now = clock()
	if now - begun <= conf.timeout_s / 10 then
		close(client)
	elseif is_fine and is_asked then
		be_quiet(now, client)
	else
		close(client)
		be_quiet(now, nil)
	end
	return nil, is_fine and why or "cannot be queried"
end

local function apply(answer, job)
	for _, name in ipairs({ "admin_comment", "qos", "partition", "account" }) do
		if answer[name] and answer[name] ~= "" then job[name] = answer[name] end
	end
end

local function tell(text)
	local slurm = rawget(_G, "slurm")
	if slurm and text and text ~= "" then slurm.log_user("%s", text) end
end

local function decide(op, job, part_list, by, job_id, jobs, partition)
	local is_newer = follow_conf()
	if is_newer and not was_newer then
		log(true, "steward_gate: a newer Steward wrote gate.conf: only its policies "
			.. "apply; install the Lua files again and restart slurmctld")
	end
	was_newer = is_newer
	if exists(conf.off_file) then return SUCCESS end
	local line, oversize = wire.request(op, steward.cluster, job, by, job_id, jobs)
	local answer, why = ask(line)
	if answer then
		if is_said then log(false, "steward_gate: the gate answers again") end
		is_said = false
		tell(answer.say)
		if not answer.ok then return REFUSED end
		apply(answer, job)
		return SUCCESS
	end
	if why and not is_said then
		is_said = true
		log(true, "steward_gate: the gate " .. why .. "; the outage policy applies until it answers")
	end
	local policy = find_policy(given(job, "partition") or partition, part_list)
	-- Nobody could make it shorter later.
	if oversize and by ~= 0 and policy ~= "observe" then
		tell(OVERSIZE)
		return REFUSED
	end
	if (op == "submit" or by ~= 0) and policy == "deny" then
		tell(DENIED)
		return REFUSED
	end
	return SUCCESS
end

local function safely(...)
	local is_fine, code = pcall(decide, ...)
	if is_fine then return code end
	pcall(log, true, "steward_gate: " .. tostring(code))
	return SUCCESS
end

-- What slurm_job_submit is to return, of a job as it is now.
function steward.submit(job_desc, part_list, submit_uid)
	return safely("submit", job_desc, part_list, submit_uid)
end

-- What slurm_job_modify is to return, of an update as it is now.
function steward.modify(job_desc, job_rec, part_list, modify_uid)
	if not wire.is_about_cost(job_desc) then return SUCCESS end
	local function number(field)
		local value = given(job_rec, field)
		return type(value) == "number" and value < NO_VAL and value or nil
	end
	local job_id, jobs = number("job_id"), nil
	local array_id, task_id = number("array_job_id"), number("array_task_id")
	if array_id and array_id > 0 then job_id = array_id end
	if job_id then jobs = format("%.0f", job_id) .. (task_id and format("_%.0f", task_id) or "") end
	local partition = given(job_rec, "partition")
	return safely("modify", job_desc, part_list, modify_uid, job_id, jobs, partition)
end

return steward
