//! What would spoil far memory in a cluster of Slurm.

use super::text::ScontrolLine;
use super::{GATE_LICENSE, POOL_LICENSE, RESERVATION, Slurm, SlurmError, setup};
use std::collections::{BTreeMap, BTreeSet};

/// Severity of a finding about a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FindingLevel {
    /// Nothing has to be done.
    Fine,
    /// Far memory works, but not as well, or not for all.
    Weak,
    /// Jobs with far memory do not start, or spoil each other.
    Broken,
}

/// Result of one check of a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterFinding {
    /// Name of the check.
    pub check: &'static str,
    /// Severity.
    pub level: FindingLevel,
    /// Finding, in a sentence.
    pub found: String,
    /// Advice for the operator; empty if nothing has to be done.
    pub advice: String,
}

/// Texts of `scontrol`, one line for each thing.
#[derive(Clone, Debug, Default)]
pub struct ClusterFacts {
    /// `scontrol show config`.
    pub config: String,
    /// `scontrol --oneliner show licenses`.
    pub licenses: String,
    /// `scontrol --oneliner show reservation`.
    pub reservations: String,
    /// `scontrol --oneliner show node`.
    pub nodes: String,
}

impl ClusterFacts {
    /// Reads the configuration and the nodes of a cluster.
    pub fn read(slurm: &Slurm) -> Result<ClusterFacts, SlurmError> {
        let show = |what| slurm.command("scontrol", &["--oneliner", "--all", "show", what]);
        Ok(ClusterFacts {
            config: show("config")?,
            licenses: show("licenses")?,
            reservations: show("reservation")?,
            nodes: show("node")?,
        })
    }

    /// Returns the user of Slurm's daemons: its name and its id.
    pub fn slurm_user(&self) -> Option<(String, u32)> {
        let (name, rest) = self.setting("SlurmUser")?.split_once('(')?;
        Some((name.to_owned(), rest.trim_end_matches(')').parse().ok()?))
    }

    /// Tells whether the reservation of the gate's licence holds.
    pub fn has_reservation(&self) -> bool {
        self.reservation().is_some_and(|fields| {
            let flags = fields.get("Flags").unwrap_or_default();
            let licenses = fields.get("Licenses").unwrap_or_default();
            fields.get("State") == Some("ACTIVE")
                && flags.split(',').any(|flag| flag == "LICENSE_ONLY" || flag == "ANY_NODES")
                && licenses.split(',').any(|license| license.split(':').next() == Some(GATE_LICENSE))
        })
    }

    /// Tells whether there is a reservation of this name at all.
    pub fn names_reservation(&self) -> bool {
        self.reservation().is_some()
    }

    /// Checks everything that Slurm shows. The order is that of the way of a job.
    pub fn findings(&self, partition: &str) -> Vec<ClusterFinding> {
        vec![
            self.submission(),
            self.memory_is_counted(),
            self.pool(),
            self.gate_license(),
            self.nodes(partition),
            self.others(partition),
            self.versions(partition),
            self.limits(),
            self.accounting(),
            self.requeue(),
            self.requeue_hold(),
        ]
    }

    /// Returns a setting of `scontrol show config`. Later ones are of other files.
    fn setting(&self, name: &str) -> Option<&str> {
        self.config.lines().find_map(|line| {
            let (key, value) = line.split_once('=')?;
            let value = value.trim();
            (key.trim().eq_ignore_ascii_case(name) && value != "(null)").then_some(value)
        })
    }

    fn has_item(&self, setting: &str, item: &str) -> bool {
        self.setting(setting).is_some_and(|value| value.split(',').any(|this| this.trim().eq_ignore_ascii_case(item)))
    }

    fn license(&self, name: &str) -> Option<u64> {
        let fields =
            self.licenses.lines().map(ScontrolLine::parse).find(|fields| fields.get("LicenseName") == Some(name))?;
        fields.get("Total")?.parse().ok()
    }

    fn reservation(&self) -> Option<ScontrolLine<'_>> {
        self.reservations
            .lines()
            .map(ScontrolLine::parse)
            .find(|fields| fields.get("ReservationName") == Some(RESERVATION))
    }

    fn partition_nodes(&self, partition: &str) -> Vec<ScontrolLine<'_>> {
        let is_in = |fields: &ScontrolLine<'_>| {
            fields.get("Partitions").is_some_and(|all| all.split(',').any(|this| this == partition))
        };
        self.nodes.lines().map(ScontrolLine::parse).filter(is_in).collect()
    }

    fn submission(&self) -> ClusterFinding {
        let check = "job_submit";
        match self.has_item("JobSubmitPlugins", "lua") {
            true => fine(check, "jobs pass the Lua script"),
            false => broken(
                check,
                "JobSubmitPlugins has no lua: comments of jobs are not understood",
                "run farfield cluster init; Debian has the plug-in in slurm-wlm-basic-plugins",
            ),
        }
    }

    fn memory_is_counted(&self) -> ClusterFinding {
        let check = "memory is counted";
        let parameters = self.setting("SelectTypeParameters").unwrap_or("(none)");
        match parameters.to_ascii_uppercase().contains("MEMORY") {
            true => fine(check, parameters),
            false => broken(
                check,
                format!("SelectTypeParameters={parameters}: Slurm does not count memory"),
                "set SelectType=select/cons_tres and SelectTypeParameters=CR_CPU_Memory, and restart slurmctld",
            ),
        }
    }

    fn pool(&self) -> ClusterFinding {
        match self.license(POOL_LICENSE) {
            Some(mib) => fine("pool", format!("{mib} MiB of far memory for all jobs")),
            None => {
                broken("pool", format!("Slurm has no licence {POOL_LICENSE}"), "run farfield cluster init --far SIZE")
            }
        }
    }

    fn gate_license(&self) -> ClusterFinding {
        let check = "gate";
        let advice = "run farfield cluster init, which makes licence and reservation";
        match (self.license(GATE_LICENSE), self.has_reservation()) {
            (Some(1), true) => fine(check, "jobs with far memory wait for the gate"),
            (Some(1), false) => broken(
                check,
                format!("no active reservation {RESERVATION} of licences: jobs start without the gate"),
                advice,
            ),
            (Some(many), _) => broken(check, format!("there are {many} licences {GATE_LICENSE}, not 1"), advice),
            (None, _) => broken(check, format!("Slurm has no licence {GATE_LICENSE}: jobs are refused"), advice),
        }
    }

    fn nodes(&self, partition: &str) -> ClusterFinding {
        let check = "nodes";
        let nodes = self.partition_nodes(partition);
        let is_away = |fields: &&ScontrolLine<'_>| {
            let state = fields.get("State").unwrap_or_default();
            ["DOWN", "DRAIN", "FAIL", "*"].iter().any(|word| state.contains(word))
        };
        let away: Vec<&str> = nodes.iter().filter(is_away).filter_map(|fields| fields.get("NodeName")).collect();
        let without: Vec<&str> = nodes
            .iter()
            .filter(|fields| fields.get("RealMemory").is_none_or(|mib| mib.parse().unwrap_or(0) <= 1))
            .filter_map(|fields| fields.get("NodeName"))
            .collect();
        if nodes.is_empty() {
            return broken(
                check,
                format!("partition {partition} has no nodes"),
                "give farfield cluster init --nodes, or another --partition",
            );
        }
        if !without.is_empty() {
            return broken(
                check,
                format!("{} have no RealMemory", without.join(",")),
                "set it in slurm.conf: slurmd -C",
            );
        }
        match away.is_empty() {
            true => fine(check, format!("{} in partition {partition}", nodes.len())),
            false => weak(
                check,
                format!("{} of {} do not take jobs: {}", away.len(), nodes.len(), away.join(",")),
                "sinfo -R says why",
            ),
        }
    }

    /// Jobs of other partitions do not ask the agent, which then gives their memory to others.
    fn others(&self, partition: &str) -> ClusterFinding {
        let check = "nodes of its own";
        let nodes = self.partition_nodes(partition);
        let is_shared = |fields: &&ScontrolLine<'_>| fields.get("Partitions").is_some_and(|all| all.contains(','));
        let shared: Vec<&str> = nodes.iter().filter(is_shared).filter_map(|fields| fields.get("NodeName")).collect();
        match shared.is_empty() {
            true => fine(check, "no other partition has them"),
            false => weak(
                check,
                format!("{} are in other partitions, too", shared.join(",")),
                "jobs there take near memory that agents do not know of: take these nodes out, or limit MaxMemPerNode \
                 there and give agents less --near",
            ),
        }
    }

    fn versions(&self, partition: &str) -> ClusterFinding {
        let check = "versions";
        let nodes = self.partition_nodes(partition);
        let all: BTreeSet<&str> = nodes.iter().filter_map(|fields| fields.get("Version")).collect();
        let own = self.setting("SLURM_VERSION").unwrap_or("unknown");
        match all.iter().all(|version| *version == own) {
            true => fine(check, format!("Slurm {own}")),
            false => weak(
                check,
                format!("slurmctld has {own}, nodes have {}", all.into_iter().collect::<Vec<_>>().join(", ")),
                "Slurm allows some distance; finish the upgrade",
            ),
        }
    }

    /// A job is allocated its least, and must be able to have all of its memory near.
    fn limits(&self) -> ClusterFinding {
        let check = "limits of memory";
        if !self.has_item("ConstrainRAMSpace", "yes") || !self.has_item("TaskPlugin", "task/cgroup") {
            return fine(check, "Slurm does not limit what a job has near; agents do");
        }
        let allowed = self.setting("AllowedRAMSpace").and_then(|value| value.trim_end_matches('%').parse::<f64>().ok());
        match allowed {
            Some(percent) if percent > 100.0 => weak(
                check,
                format!("a job may have {percent} % of its least near"),
                format!("jobs with a least below {:.2} need more: AllowedRAMSpace in cgroup.conf", 100.0 / percent),
            ),
            _ => broken(
                check,
                "ConstrainRAMSpace=yes: a job is killed when it has more near than its least",
                "set AllowedRAMSpace=400 in cgroup.conf for jobs whose least is a quarter or more, or \
                 ConstrainRAMSpace=no",
            ),
        }
    }

    fn accounting(&self) -> ClusterFinding {
        let check = "accounting";
        match self.has_item("JobAcctGatherParams", "OverMemoryKill") {
            false => fine(check, "kills no job for its memory"),
            true => broken(
                check,
                "JobAcctGatherParams=OverMemoryKill: a job is killed when it has more near than its least",
                "remove OverMemoryKill",
            ),
        }
    }

    fn has_exit_code(&self, setting: &str, code: u8) -> bool {
        self.setting(setting).is_some_and(|list| setup::has_exit_code(list, &code.to_string()))
    }

    fn requeue(&self) -> ClusterFinding {
        let (check, code) = ("requeue", setup::REQUEUE_EXIT);
        match self.has_exit_code("RequeueExit", code) && self.setting("JobRequeue") != Some("0") {
            true => fine(check, format!("jobs that lose their memory server ({code}) start again")),
            false => weak(
                check,
                format!("jobs that lose their memory server end with {code} and stay ended"),
                format!("RequeueExit={code}, and JobRequeue=1"),
            ),
        }
    }

    fn requeue_hold(&self) -> ClusterFinding {
        let (check, code) = ("requeue and hold", setup::HOLD_EXIT);
        if self.has_exit_code("RequeueExit", code) {
            return weak(
                check,
                format!("RequeueExit has {code}: on a node without an agent, jobs start again without end"),
                format!("move {code} to RequeueExitHold"),
            );
        }
        match self.has_exit_code("RequeueExitHold", code) {
            true => fine(check, format!("jobs on a node without an agent ({code}) are held until they are released")),
            false => weak(
                check,
                format!("jobs on a node without an agent end with {code} and are lost"),
                format!("RequeueExitHold={code}: farfield cluster init writes it; scontrol release JOB goes on"),
            ),
        }
    }
}

fn fine(check: &'static str, found: impl Into<String>) -> ClusterFinding {
    ClusterFinding { check, level: FindingLevel::Fine, found: found.into(), advice: String::new() }
}

fn weak(check: &'static str, found: impl Into<String>, advice: impl Into<String>) -> ClusterFinding {
    ClusterFinding { check, level: FindingLevel::Weak, found: found.into(), advice: advice.into() }
}

fn broken(check: &'static str, found: impl Into<String>, advice: impl Into<String>) -> ClusterFinding {
    ClusterFinding { check, level: FindingLevel::Broken, found: found.into(), advice: advice.into() }
}

/// Counts nodes by name, for agents: near memory that Slurm gives each node of a partition, in MiB.
pub fn node_memory(facts: &ClusterFacts, partition: &str) -> BTreeMap<String, u64> {
    let nodes = facts.partition_nodes(partition);
    let memory =
        |fields: &ScontrolLine<'_>| Some((fields.get("NodeName")?.to_owned(), fields.get("RealMemory")?.parse().ok()?));
    nodes.iter().filter_map(memory).collect()
}

#[cfg(test)]
mod tests {
    //! Guards against a cluster that is called sound and loses jobs.
    use super::*;

    fn sound() -> ClusterFacts {
        ClusterFacts {
            config: "Configuration data as of x\nJobAcctGatherParams     = (null)\nJobRequeue              = 1\n\
                     JobSubmitPlugins        = lua\nRequeueExit             = 93\n\
                     RequeueExitHold         = 97\n\
                     SelectTypeParameters    = CR_CPU_MEMORY\nSlurmUser               = slurm(64030)\n\
                     SLURM_VERSION           = 22.05.8\nTaskPlugin              = task/none\n"
                .into(),
            licenses: "LicenseName=farfield_gate Total=1 Used=0 Free=1\nLicenseName=farmem Total=96 Used=0\n".into(),
            reservations: "ReservationName=farfield_gate Flags=ANY_NODES Licenses=farfield_gate:1 State=ACTIVE\n"
                .into(),
            nodes: "NodeName=n1 RealMemory=4096 State=IDLE Partitions=far Version=22.05.8\n".into(),
        }
    }

    #[test]
    fn a_sound_cluster_has_no_advice() {
        let facts = sound();
        assert!(
            facts
                .findings("far")
                .iter()
                .all(|finding| finding.level == FindingLevel::Fine && finding.advice.is_empty())
        );
        assert_eq!(facts.slurm_user(), Some(("slurm".into(), 64030)));
        assert_eq!(node_memory(&facts, "far"), BTreeMap::from([("n1".into(), 4096)]));
    }

    #[test]
    fn everything_that_spoils_a_cluster_is_found_and_has_advice() {
        let check = |change: &dyn Fn(&mut ClusterFacts), name: &str, level: FindingLevel| {
            let mut facts = sound();
            change(&mut facts);
            let findings = facts.findings("far");
            let bad: Vec<_> = findings.iter().filter(|finding| finding.level != FindingLevel::Fine).collect();
            assert!(bad.iter().all(|finding| !finding.advice.is_empty()));
            assert_eq!(bad.iter().map(|finding| (finding.check, finding.level)).collect::<Vec<_>>(), [(name, level)]);
        };
        let config = |from: &'static str, to: &'static str| {
            move |facts: &mut ClusterFacts| {
                assert!(facts.config.contains(from));
                facts.config = facts.config.replace(from, to);
            }
        };
        use FindingLevel::{Broken, Weak};
        check(&config("= lua", "= (null)"), "job_submit", Broken);
        check(&config("CR_CPU_MEMORY", "CR_CPU"), "memory is counted", Broken);
        check(
            &config("task/none", "task/cgroup\nConstrainRAMSpace = yes\nAllowedRAMSpace = 100.0%"),
            "limits of memory",
            Broken,
        );
        check(
            &config("task/none", "task/affinity,task/cgroup\nConstrainRAMSpace = yes\nAllowedRAMSpace = 300.0%"),
            "limits of memory",
            Weak,
        );
        check(&config("(null)", "OverMemoryKill"), "accounting", Broken);
        check(&config("RequeueExit             = 93", "RequeueExit = 9"), "requeue", Weak);
        check(&config("JobRequeue              = 1", "JobRequeue = 0"), "requeue", Weak);
        check(&config("RequeueExitHold         = 97", "RequeueExitHold = (null)"), "requeue and hold", Weak);
        check(&config("RequeueExitHold         = 97", "RequeueExitHold = 9"), "requeue and hold", Weak);
        check(&config("RequeueExit             = 93", "RequeueExit = 93-97"), "requeue and hold", Weak);
        check(&config("22.05.8", "23.11.4"), "versions", Weak);
        check(&|facts| facts.licenses = facts.licenses.replace("farmem", "other"), "pool", Broken);
        check(&|facts| facts.licenses = facts.licenses.replace("farfield_gate", "other"), "gate", Broken);
        check(&|facts| facts.licenses = facts.licenses.replace("Total=1 ", "Total=2 "), "gate", Broken);
        check(&|facts| facts.reservations = "No reservations in the system".into(), "gate", Broken);
        check(&|facts| facts.reservations = facts.reservations.replace("ACTIVE", "INACTIVE"), "gate", Broken);
        check(&|facts| facts.nodes = facts.nodes.replace("IDLE", "DOWN*"), "nodes", Weak);
        check(&|facts| facts.nodes = facts.nodes.replace("far", "fast"), "nodes", Broken);
        check(&|facts| facts.nodes = facts.nodes.replace("4096", "1"), "nodes", Broken);
        check(&|facts| facts.nodes = facts.nodes.replace("=far", "=far,debug"), "nodes of its own", Weak);
    }
}
