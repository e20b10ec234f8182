//! Text of Slurm's commands: what they write, and what is written by them.

use super::{GATE_LICENSE, POOL_LICENSE};
use crate::gate::{BookChange, SchedulerJob, SchedulerState};
use farfield_core::policy::cluster::{GateJob, GateNode, GatePhase, NodeShape};
use std::collections::BTreeMap;

/// Largest memory of a job or a node in MiB: 16 TiB. More is nonsense, and is not added up.
const MIB_MAX: u64 = 1 << 24;
/// Reasons for which a pending job waits that are nothing but a lack of room, or none.
const ROOM_REASONS: [&str; 6] = ["None", "Licenses", "Priority", "Resources", "ReqNodeNotAvail", "Nodes"];
/// States of a node in which jobs start. Every other word in a state forbids it.
const UP_STATES: [&str; 6] = ["IDLE", "MIXED", "ALLOCATED", "COMPLETING", "CLOUD", "PLANNED"];
/// States of a job that has not started.
const PENDING_STATES: [&str; 4] = ["PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"];
/// States of a job that has its node. Jobs in any other state have ended.
const RUNNING_STATES: [&str; 8] =
    ["RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT"];

/// A line of `scontrol --oneliner`: words `Name=value`. Of words with one name the first counts,
/// because texts that people write come after the fields that are read here.
#[derive(Clone, Debug, Default)]
pub struct ScontrolLine<'a>(BTreeMap<&'a str, &'a str>);

impl<'a> ScontrolLine<'a> {
    /// Splits a line.
    pub fn parse(line: &'a str) -> ScontrolLine<'a> {
        let mut fields = BTreeMap::new();
        for (name, value) in line.split_whitespace().filter_map(|word| word.split_once('=')) {
            fields.entry(name).or_insert(value);
        }
        ScontrolLine(fields)
    }

    /// Returns a value.
    pub fn get(&self, name: &str) -> Option<&'a str> {
        self.0.get(name).copied()
    }

    fn number(&self, name: &str) -> Option<u64> {
        self.get(name)?.parse().ok()
    }
}

/// Claim of a job and decision of a gate about it, as the AdminComment says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FarComment {
    /// Memory in MiB.
    pub memory_mib: u64,
    /// Least near memory in MiB.
    pub least_mib: u64,
    /// Node and time of the admission, in seconds since the epoch.
    pub admitted: Option<(String, u64)>,
}

impl FarComment {
    const PREFIX: &str = "farfield:";

    /// Parses a comment; `None` if it is not ours, or none that we would write.
    pub fn parse(comment: &str) -> Option<FarComment> {
        let mut fields = BTreeMap::new();
        for word in comment.strip_prefix(Self::PREFIX)?.split(',') {
            let (name, value) = word.split_once('=')?;
            fields.insert(name, value);
        }
        let mib = |name: &str| fields.get(name)?.parse().ok().filter(|mib| (1..=MIB_MAX).contains(mib));
        let (memory_mib, least_mib) = (mib("mem")?, mib("least")?);
        let admitted = match (fields.get("node"), fields.get("at")) {
            (Some(node), Some(at)) => Some(((*node).to_owned(), at.parse().ok()?)),
            _ => None,
        };
        (least_mib <= memory_mib).then_some(FarComment { memory_mib, least_mib, admitted })
    }

    fn text(memory_mib: u64, least_mib: u64, admitted: Option<(&str, u64)>) -> String {
        let claim = format!("{}mem={memory_mib},least={least_mib}", Self::PREFIX);
        match admitted {
            Some((node, at_s)) => format!("{claim},node={node},at={at_s}"),
            None => claim,
        }
    }
}

/// A line of `squeue`.
#[derive(Clone, Debug)]
pub(super) struct QueueLine<'a> {
    id: &'a str,
    state: &'a str,
    reason: &'a str,
    licenses: &'a str,
    nodes: &'a str,
    cores: u32,
    priority: u64,
    comment: &'a str,
    eligible_s: Option<u64>,
}

impl<'a> QueueLine<'a> {
    /// Fields in the order in which they are parsed. None of them is written by users as they like.
    pub(super) const FORMAT: &'static str = "JobArrayID:|,State:|,Licenses:|,NodeList:|,NumCPUs:|,PriorityLong:|,\
        admin_comment:|,EligibleTime:|,Reason:|";

    fn parse(line: &'a str) -> Option<QueueLine<'a>> {
        let mut fields = line.split('|').map(str::trim);
        let mut next = || fields.next();
        let (id, state, licenses, nodes) = (next()?, next()?, next()?, next()?);
        let (cores, priority, comment, eligible) = (next()?, next()?, next()?, next()?);
        // The id becomes an argument of commands.
        let is_id = |id: &str| !id.is_empty() && id.chars().all(|c| c.is_ascii_digit() || c == '_');
        is_id(id).then_some(QueueLine {
            id,
            state,
            reason: next()?,
            licenses,
            nodes,
            cores: cores.parse().ok()?,
            priority: priority.parse().ok()?,
            comment,
            eligible_s: eligible.parse().ok(),
        })
    }

    fn licenses(&self) -> impl Iterator<Item = (&'a str, u64)> {
        self.licenses.split([',', ';']).filter(|license| !license.is_empty() && *license != "(null)").map(|license| {
            let (name, count) = license.split_once(':').unwrap_or((license, "1"));
            (name, count.parse().unwrap_or(u64::MAX))
        })
    }

    fn has_gate_license(&self) -> bool {
        self.licenses().any(|(name, _)| name == GATE_LICENSE)
    }
}

/// Makes the state of a cluster of `scontrol --oneliner show node` and `squeue`. The pool is added by
/// others.
pub fn state(partition: &str, nodes: &str, jobs: &str, now_s: u64) -> SchedulerState {
    let mut state = SchedulerState::default();
    for line in nodes.lines() {
        state.nodes.extend(parse_node(line, partition));
    }
    let numbers: BTreeMap<String, usize> =
        state.nodes.iter().enumerate().map(|(index, (name, _))| (name.clone(), index)).collect();
    let mut ranked = Vec::new();
    for line in jobs.lines().filter(|line| !line.trim().is_empty()) {
        let Some(record) = QueueLine::parse(line) else {
            state.ignored.push((
                line.split('|').next().unwrap_or_default().to_owned(),
                "squeue's line is not understood".into(),
            ));
            continue;
        };
        let is_pending = PENDING_STATES.contains(&record.state);
        if !is_pending && !RUNNING_STATES.contains(&record.state) {
            continue;
        }
        match parse_job(&record, is_pending, &numbers, now_s) {
            Ok(Some(job)) => ranked.push((record.priority, record.eligible_s, job)),
            Ok(None) => {}
            Err(reason) => state.ignored.push((record.id.to_owned(), reason)),
        }
    }
    ranked.sort_by(|one, other| (other.0, one.1).cmp(&(one.0, other.1)));
    state.jobs = ranked.into_iter().map(|(_, _, job)| job).collect();
    for job in &state.jobs {
        // What is left of a node's books belongs to jobs without far memory.
        if let Some(GatePhase::Running { node, .. }) = job.phase {
            let node = &mut state.nodes[node].1;
            node.foreign_cores = node.foreign_cores.saturating_sub(job.class.cores());
            node.foreign_bytes = node.foreign_bytes.saturating_sub(job.class.least_bytes());
        }
    }
    state
}

fn parse_node(line: &str, partition: &str) -> Option<(String, GateNode)> {
    let fields = ScontrolLine::parse(line);
    let name = fields.get("NodeName")?;
    if !fields.get("Partitions")?.split(',').any(|this| this == partition) {
        return None;
    }
    let cores = fields.number("CPUEfctv").or_else(|| fields.number("CPUTot"))?;
    let memory_mib = fields.number("RealMemory")?.saturating_sub(fields.number("MemSpecLimit").unwrap_or(0));
    let state = fields.get("State")?;
    let shape =
        NodeShape { cores: u32::try_from(cores).ok()?, reclaim_cores: 0, memory_bytes: memory_mib.min(MIB_MAX) << 20 };
    let node = GateNode {
        shape,
        foreign_cores: fields.number("CPUAlloc").and_then(|cores| u32::try_from(cores).ok()).unwrap_or(0),
        foreign_bytes: fields.number("AllocMem").unwrap_or(0).min(MIB_MAX) << 20,
        is_up: state.split('+').all(|word| UP_STATES.contains(&word)),
    };
    Some((name.to_owned(), node))
}

/// `None` for a job without far memory.
fn parse_job(
    record: &QueueLine<'_>,
    is_pending: bool,
    nodes: &BTreeMap<String, usize>,
    now_s: u64,
) -> Result<Option<SchedulerJob>, String> {
    let Some(comment) = FarComment::parse(record.comment) else {
        return match record.has_gate_license() || record.comment.starts_with(FarComment::PREFIX) {
            true => Err(format!("its AdminComment, {:?}, does not say what it asked for", record.comment)),
            false => Ok(None),
        };
    };
    let FarComment { memory_mib, least_mib, admitted } = comment;
    let class = GateJob::class(record.cores, memory_mib << 20, least_mib << 20).map_err(|error| error.to_string())?;
    let far_mib = record.licenses().find(|(name, _)| *name == POOL_LICENSE).map_or(0, |(_, count)| count);
    let far_bytes = far_mib.min(MIB_MAX) << 20;
    let waited_s = record.eligible_s.map_or(0, |since| now_s.saturating_sub(since));
    let reason = record.reason.split([',', ' ', '(']).find(|word| !word.is_empty()).unwrap_or("None");
    let node = |name: &str| nodes.get(name).copied();
    let phase = if !is_pending {
        let node = node(record.nodes)
            .ok_or_else(|| format!("it runs on {}, which is no node of the partition", record.nodes))?;
        Some(GatePhase::Running { node, far_bytes })
    } else if record.has_gate_license() {
        let has_room_only = record.state == "PENDING" && ROOM_REASONS.contains(&reason);
        let is_eligible = record.eligible_s.is_some_and(|since| since <= now_s);
        Some(if has_room_only && is_eligible { GatePhase::Waiting } else { GatePhase::Held })
    } else {
        // Without both it could start wherever there is room.
        admitted.and_then(|(name, at_s)| {
            Some(GatePhase::Admitted { node: node(&name)?, far_bytes, age_s: now_s.saturating_sub(at_s) })
        })
    };
    let other_licenses = record
        .licenses()
        .filter(|(name, _)| ![GATE_LICENSE, POOL_LICENSE].contains(name))
        .map(|(name, count)| format!("{name}:{count}"))
        .collect();
    Ok(Some(SchedulerJob { id: record.id.to_owned(), class, waited_s, phase, other_licenses }))
}

/// Returns the words behind `scontrol update` for a change.
pub fn update_words(job: &SchedulerJob, change: &BookChange<'_>) -> Vec<String> {
    let licenses = |own: Option<(&str, u64)>| {
        let own = own.map(|(name, count)| format!("{name}:{count}"));
        let all: Vec<String> = job.other_licenses.iter().cloned().chain(own).collect();
        format!("Licenses={}", all.join(","))
    };
    let pool = |far_bytes: u64| (far_bytes > 0).then(|| (POOL_LICENSE, far_bytes.div_ceil(1 << 20)));
    let comment = |admitted| {
        let text = FarComment::text(job.class.memory_bytes() >> 20, job.class.least_bytes() >> 20, admitted);
        format!("AdminComment={text}")
    };
    let id = format!("JobId={}", job.id);
    match *change {
        BookChange::Charge { far_bytes } => vec![id, licenses(pool(far_bytes))],
        BookChange::Withdraw => vec![id, "NodeList=".into(), licenses(Some((GATE_LICENSE, 1))), comment(None)],
        BookChange::Admit { node, far_bytes, now_s } => {
            vec![id, format!("NodeList={node}"), licenses(pool(far_bytes)), comment(Some((node, now_s)))]
        }
    }
}
