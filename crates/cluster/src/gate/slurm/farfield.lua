-- Far memory for jobs of Slurm: written by `farfield cluster init`, which overwrites changes.
--
-- A job says in its comment how much of its memory must be near at the least, as a part or as a size:
--
--     sbatch --mem=8G --comment=farfield:least=0.5 job.sh
--
-- Slurm then counts the job with that much memory, and the job waits for a licence that nobody can
-- have. `farfield gate slurm` replaces it when there is room. What the job asked for is in its
-- AdminComment, which only operators can write.

local PARTITION = "@PARTITION@"
local GATE_UID = @UID@
local GATE = "@GATE_LICENSE@"
local POOL = "@POOL_LICENSE@"
local LEAST_MIB_MIN = 16
local NO_VAL, NO_VAL16 = 4294967294, 65534

local function refuse(...)
  slurm.log_user("farfield: " .. string.format(...))
  return slurm.ERROR
end

local function is_given(value, unset)
  return value ~= nil and value ~= "" and value ~= unset
end

-- Returns the least near memory in MiB, or nil.
local function least_mib(text, mem_mib)
  local number, unit = string.match(text, "^(%d*%.?%d+)([KMGTkmgt]?)$")
  number = tonumber(number)
  if number == nil then return nil end
  local scale = { K = 1 / 1024, M = 1, G = 1024, T = 1024 * 1024 }
  local mib = unit == "" and number <= 1 and number * mem_mib or unit ~= "" and number * scale[string.upper(unit)]
  if not mib then return nil end
  return math.max(math.ceil(mib - 1e-6), LEAST_MIB_MIN)
end

function farfield_job_submit(job)
  local text = string.match(job.comment or "", "farfield:least=([^%s,;]+)")
  if is_given(job.licenses) and string.find(job.licenses, POOL, 1, true) then
    return refuse("the licence %s is given by the gate: ask for far memory by --comment=farfield:least=0.5", POOL)
  end
  if is_given(job.licenses) and string.find(job.licenses, GATE, 1, true) then
    return refuse("the licence %s is nobody's", GATE)
  end
  if text == nil then
    if string.find(job.comment or "", "farfield", 1, true) then
      return refuse("the comment is not understood: write --comment=farfield:least=0.5, or least=4G")
    end
    for name in string.gmatch(job.partition or "", "[^,]+") do
      if name == PARTITION then
        return refuse("jobs of partition %s say how much must be near: --comment=farfield:least=0.5", PARTITION)
      end
    end
    return slurm.SUCCESS
  end
  if is_given(job.partition) and job.partition ~= PARTITION then
    return refuse("jobs with far memory run in partition %s", PARTITION)
  end
  local mem = job.min_mem_per_node
  if mem == nil or mem <= 0 then
    return refuse("say how much memory the job needs, near and far: --mem=8G (neither --mem-per-cpu nor --mem=0)")
  end
  local least = least_mib(text, mem)
  if least == nil then
    return refuse("least=%s is neither a part, like 0.5, nor a size, like 4G", text)
  end
  if least > mem then
    return refuse("the least near memory, %d MiB, is more than the memory of the job, %d MiB", least, mem)
  end
  for _, nodes in ipairs({ job.min_nodes, job.max_nodes }) do
    if is_given(nodes, NO_VAL) and nodes > 1 then
      return refuse("a job with far memory runs on one node: drop the comment, or ask for one node")
    end
  end
  if is_given(job.shared, NO_VAL16) and job.shared == 0 then
    return refuse("a job that has a node for itself needs no far memory: drop --exclusive, or the comment")
  end
  if is_given(job.het_job_offset, NO_VAL) then
    return refuse("a part of a heterogeneous job cannot have far memory")
  end
  for _, choice in ipairs({
    { "--nodelist", job.req_nodes }, { "--exclude", job.exc_nodes }, { "--constraint", job.features },
    { "--gres", job.gres }, { "--gpus", job.tres_per_job }, { "--gpus-per-task", job.tres_per_task },
    { "--gpus-per-socket", job.tres_per_socket }, { "--reservation", job.reservation },
  }) do
    if is_given(choice[2]) then
      return refuse("the gate chooses the node of a job with far memory: drop %s", choice[1])
    end
  end
  job.partition = PARTITION
  job.admin_comment = string.format("farfield:mem=%d,least=%d", mem, least)
  job.min_mem_per_node = least
  job.licenses = (is_given(job.licenses) and job.licenses .. "," or "") .. GATE .. ":1"
  -- Only batch jobs have an environment here. `farfield run --agent` reads it.
  if job.script ~= nil and job.environment ~= nil then
    job.environment["FARFIELD_JOB_MEM"] = string.format("%dM", mem)
    job.environment["FARFIELD_JOB_LEAST"] = string.format("%dM", least)
  end
  return slurm.SUCCESS
end

-- What the gate has written is changed by operators only.
function farfield_job_modify(job, record, uid)
  if uid == 0 or uid == GATE_UID then return slurm.SUCCESS end
  local is_far = string.sub(record.admin_comment or "", 1, 9) == "farfield:"
  if not is_far then
    if is_given(job.partition) and job.partition == PARTITION then
      return refuse("a job gets far memory when it is submitted: --comment=farfield:least=0.5")
    end
    if is_given(job.licenses) and (string.find(job.licenses, POOL, 1, true) or string.find(job.licenses, GATE, 1, true)) then
      return refuse("these licences are given by the gate")
    end
    return slurm.SUCCESS
  end
  for _, change in ipairs({
    { "licences", job.licenses ~= nil }, { "memory", job.min_mem_per_node ~= nil or job.min_mem_per_cpu ~= nil },
    { "nodes", job.req_nodes ~= nil or job.exc_nodes ~= nil }, { "features", job.features ~= nil },
    { "number of nodes", is_given(job.min_nodes, NO_VAL) or is_given(job.max_nodes, NO_VAL) },
    { "partition", job.partition ~= nil }, { "administrator's comment", job.admin_comment ~= nil },
  }) do
    if change[2] then
      return refuse("the %s of a job with far memory cannot be changed: cancel it and submit it again", change[1])
    end
  end
  return slurm.SUCCESS
end
