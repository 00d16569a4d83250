-- The two lines of JSON between slurmctld and Steward's gate, for steward_gate.lua.
--
-- What is written holds texts of users, what is read may come from a gate that is broken:
-- so any bytes can be written, and reading is total. Names on the wire are those of
-- gate_vectors.json, which this and the plugin in C agree on. Lua 5.1 to 5.4.

local wire = {}

-- Taken now: a site's script may change these for its own ends.
local byte, char, find, format = string.byte, string.char, string.find, string.format
local gsub, match, sub = string.gsub, string.match, string.sub
local concat, floor = table.concat, math.floor
local ipairs, pcall, tonumber, type = ipairs, pcall, tonumber, type

local NO_VAL, INFINITE, NO_VAL16 = 4294967294, 4294967295, 65534
local LONGEST_TEXT, LONGEST_NODELIST, DEPTH = 4096, 65536, 16

-- ---- Writing ------------------------------------------------------------------------------

-- Texts that are priced, or that say who pays; see LONGEST_TEXTS in estimate/bounds.py.
local TEXTS = {
	{ "account", "account" }, { "partition", "partition" }, { "qos", "qos" },
	{ "array_inx", "array" }, { "req_nodes", "req_nodes", LONGEST_NODELIST },
	{ "licenses", "licenses" }, { "tres_per_job", "tres_per_job" },
	{ "tres_per_node", "tres_per_node" }, { "tres_per_socket", "tres_per_socket" },
	{ "tres_per_task", "tres_per_task" }, { "cpus_per_tres", "cpus_per_tres" },
	{ "mem_per_tres", "mem_per_tres" },
}

-- By Slurm's name and the wire's, and the least value that means nothing is set.
local NUMBERS = {
	{ "min_nodes", "min_nodes", NO_VAL }, { "max_nodes", "max_nodes", NO_VAL },
	{ "num_tasks", "num_tasks", NO_VAL }, { "cpus_per_task", "cpus_per_task", NO_VAL16 },
	{ "min_cpus", "min_cpus", NO_VAL }, { "max_cpus", "max_cpus", NO_VAL },
	{ "pn_min_cpus", "pn_min_cpus", NO_VAL16 },
	{ "min_mem_per_node", "pn_min_memory_mib", 2 ^ 62 },
	{ "min_mem_per_cpu", "mem_per_cpu_mib", 2 ^ 62 },
	{ "ntasks_per_node", "ntasks_per_node", NO_VAL16 },
	{ "ntasks_per_socket", "ntasks_per_socket", NO_VAL16 },
	{ "ntasks_per_core", "ntasks_per_core", NO_VAL16 },
	{ "ntasks_per_tres", "ntasks_per_tres", NO_VAL16 },
	{ "sockets_per_node", "sockets_per_node", NO_VAL16 },
	{ "cores_per_socket", "cores_per_socket", NO_VAL16 },
	{ "threads_per_core", "threads_per_core", NO_VAL16 },
	{ "core_spec", "core_spec", NO_VAL16 }, { "thread_spec", "core_spec", NO_VAL16 },
}

local function escaped(one)
	if one == '"' or one == "\\" then return "\\" .. one end
	return format("\\u%04x", byte(one))
end

-- How many bytes the UTF-8 sequence has that begins so, and its second byte's least and most.
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

-- Of bytes beyond ASCII those that are no UTF-8 become \xff in writing.
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

local function quoted(text)
	text = gsub(text, '[%z\1-\31"\\\127]', escaped)
	if find(text, "[\128-\255]") then text = gsub(text, "[\128-\255]+", utf8_only) end
	return '"' .. text .. '"'
end

-- A field of Slurm's, which may not have it.
function wire.given(job, field)
	local is_fine, value = pcall(function() return job[field] end)
	if is_fine then return value end
	return nil
end

local given = wire.given

local function number_of(job, field, unset)
	local value = given(job, field)
	if type(value) ~= "number" or value ~= value or value < 0 or value >= unset then return nil end
	return value
end

local function minutes(job, field)
	if given(job, field) == INFINITE then return "-1" end
	local value = number_of(job, field, NO_VAL)
	return value and format("%.0f", value)
end

local function has_bit(value, bit)
	return type(value) == "number" and floor(value / 2 ^ bit) % 2 == 1
end

-- Whether an update gives a job a priority, and so lets it go if it was held.
local function is_released(job)
	return (number_of(job, "priority", NO_VAL) or 0) > 0 or given(job, "priority") == INFINITE
end

-- Whether an update may make a job cost more; a note, a new name or a hold does not.
function wire.is_about_cost(job)
	for _, pair in ipairs(TEXTS) do
		if given(job, pair[1]) then return true end
	end
	for _, names in ipairs(NUMBERS) do
		if number_of(job, names[1], names[3]) then return true end
	end
	return (minutes(job, "time_limit") or minutes(job, "time_min")
		or number_of(job, "shared", NO_VAL16)
		or is_released(job) or (number_of(job, "begin_time", 2 ^ 53) or 0) > 0)
		and true or false
end

-- The question as one line, and the field of the first text of which only the beginning is in
-- it. Of an update with what it is of: a job's number, and how commands name the jobs meant.
function wire.request(op, cluster, job, by, job_id, jobs)
	local parts = {}
	local function add(name, json)
		if json then parts[#parts + 1] = '"' .. name .. '":' .. json end
	end
	local oversize
	local function cut(name, text, longest)
		if #text <= longest then return quoted(text) end
		oversize = oversize or name
		return quoted(sub(text, 1, longest))
	end
	local function add_text(field, name, longest)
		local value = given(job, field)
		if type(value) ~= "string" or value == "" then return end
		add(name, cut(name, value, longest or LONGEST_TEXT))
	end
	local function add_true(name, is_so) add(name, is_so and "true") end
	-- The user is the job's, never who submits it; an update names whom it likes.
	local uid = op == "submit" and number_of(job, "user_id", NO_VAL)
	add("uid", uid and format("%.0f", uid) or "-1")
	add("job_id", job_id and format("%.0f", job_id))
	for _, one in ipairs(TEXTS) do add_text(one[1], one[2], one[3]) end
	-- The gate adds its token to it.
	if op == "submit" then add_text("admin_comment", "admin_comment") end
	add("time_limit_min", minutes(job, "time_limit"))
	add("time_min_min", minutes(job, "time_min"))
	for _, names in ipairs(NUMBERS) do
		local value = number_of(job, names[1], names[3])
		-- A Slurm that does not tell threads from cores here has them marked.
		if value and names[2] == "core_spec" then value = value % 32768 end
		add(names[2], value and format("%.0f", value))
	end
	local shared = number_of(job, "shared", NO_VAL16)
	-- Jobs of one user or MCS label (2, 3) may share a node, and are billed what they ask for.
	add_true("exclusive", shared == 0 or shared == 4)
	local begin = number_of(job, "begin_time", 2 ^ 33)
	add("begin_us", begin and begin > 0 and format("%.0f000000", begin))
	add_true("held", given(job, "priority") == 0)
	add_true("released", op == "modify" and is_released(job))
	add_true("het", op == "submit" and number_of(job, "het_job_offset", NO_VAL))
	add_true("cron", has_bit(given(job, "bitflags"), 22))
	jobs = jobs and ',"jobs":' .. cut("jobs", jobs, LONGEST_TEXT) or ""
	local line = format('{"v":1,"op":"%s","cluster":%s,"by":%.0f%s,"job":{', op,
		quoted(cluster), by, jobs) .. concat(parts, ",") .. "}"
	if oversize then line = line .. ',"oversize":"' .. oversize .. '"' end
	return line .. "}\n", oversize
end

-- ---- Reading ------------------------------------------------------------------------------

local MEANT = { ['"'] = '"', ["\\"] = "\\", ["/"] = "/", b = "\b", f = "\f", n = "\n", r = "\r",
	t = "\t" }
local OURS = { say = true, admin_comment = true, qos = true, partition = true, account = true }

local function utf8_of(code)
	if code < 128 then return char(code) end
	local last = 128 + code % 64
	code = floor(code / 64)
	if code < 32 then return char(192 + code, last) end
	local middle = 128 + code % 64
	code = floor(code / 64)
	if code < 16 then return char(224 + code, middle, last) end
	return char(240 + floor(code / 64), 128 + code % 64, middle, last)
end

-- What stands behind \u at `at`: as UTF-8, and what comes after it.
local function read_code(text, at)
	local hex = match(text, "^%x%x%x%x", at)
	local code = hex and tonumber(hex, 16)
	if not code or code == 0 then return nil end -- a NUL would end the text for Slurm
	at = at + 4
	if code >= 55296 and code < 56320 then
		local low = match(text, "^\\u(%x%x%x%x)", at)
		low = low and tonumber(low, 16)
		if low and low >= 56320 and low < 57344 then
			return utf8_of(65536 + (code - 55296) * 1024 + low - 56320), at + 6
		end
	end
	if code >= 55296 and code < 57344 then code = 65533 end
	return utf8_of(code), at
end

local function past_blanks(text, at)
	return match(text, "^[ \t\r]*()", at)
end

-- A string at `at`, and what comes after it; nil if there is none.
local function read_string(text, at)
	at = past_blanks(text, at)
	if sub(text, at, at) ~= '"' then return nil end
	at = at + 1
	local parts = {}
	while true do
		local plain, next_at = match(text, '^([^"\\%z\1-\31]*)()', at)
		parts[#parts + 1] = plain
		at = next_at
		local one = sub(text, at, at)
		if one == '"' then return concat(parts), at + 1 end
		if one ~= "\\" then return nil end
		one = sub(text, at + 1, at + 1)
		local value
		if one == "u" then
			value, at = read_code(text, at + 2)
		else
			value, at = MEANT[one], at + 2
		end
		if not value then return nil end
		parts[#parts + 1] = value
	end
end

local function read_number(text, at)
	return match(text, "^[ \t\r]*(%-?%d[%d+%-.eE]*)()", at)
end

-- What comes after a value of any kind, which a later gate may send; nil if there is none.
local function past_value(text, at, depth)
	at = past_blanks(text, at)
	local one = sub(text, at, at)
	if depth > DEPTH or one == "" then return nil end
	if one == '"' then
		local _, next_at = read_string(text, at)
		return next_at
	end
	if one ~= "{" and one ~= "[" then
		local _, next_at = read_number(text, at)
		return next_at or match(text, "^true()", at) or match(text, "^false()", at)
			or match(text, "^null()", at)
	end
	local close = one == "{" and "^[ \t\r]*}()" or "^[ \t\r]*%]()"
	at = at + 1
	local empty = match(text, close, at)
	if empty then return empty end
	while true do
		if one == "{" then
			local name, next_at = read_string(text, at)
			at = name and match(text, "^[ \t\r]*:()", next_at)
			if not at then return nil end
		end
		at = past_value(text, at, depth + 1)
		if not at then return nil end
		local more = match(text, "^[ \t\r]*,()", at)
		if not more then return match(text, close, at) end
		at = more
	end
end

local function read_member(text, name, at, answer)
	if OURS[name] then
		answer[name], at = read_string(text, at)
		return answer[name] and at
	end
	if name == "v" then
		local number
		number, at = read_number(text, at)
		answer.v = number
		return number == "1" and at
	end
	if name == "ok" then
		at = past_blanks(text, at)
		answer.ok = match(text, "^true", at) ~= nil
		answer.is_said = true
		return match(text, "^true()", at) or match(text, "^false()", at)
	end
	return past_value(text, at, 1)
end

-- An answer, from a text that holds its newline; nil if it is none.
function wire.answer(text)
	local line = match(text, "^([^\n]*)\n")
	local at = line and match(line, "^[ \t\r]*{()")
	if not at then return nil end
	local answer = {}
	repeat
		local name, next_at = read_string(line, at)
		next_at = name and match(line, "^[ \t\r]*:()", next_at)
		at = next_at and read_member(line, name, next_at, answer)
		if not at then return nil end
		local more = match(line, "^[ \t\r]*,()", at)
		local is_last = not more
		at = more or at
	until is_last
	if not match(line, "^[ \t\r]*}[ \t\r]*$", at) or not answer.v or not answer.is_said then
		return nil
	end
	return answer
end

return wire
