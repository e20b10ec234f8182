//! Checks of a cluster: `farfield doctor --cluster`.

use super::CheckResult;
use farfield_cluster::gate::slurm::Slurm;
use farfield_cluster::gate::slurm::checks::{ClusterFacts, FindingLevel, node_memory};
use farfield_pager::runner::{self, ByteSize};

/// Checks Slurm, the memory servers, and the agent of this machine if it is a node.
pub(super) fn findings(partition: &str, far: &[String], token: &[u8]) -> Vec<CheckResult> {
    let slurm = Slurm::new(partition);
    let facts = match ClusterFacts::read(&slurm) {
        Ok(facts) => facts,
        Err(error) => {
            let advice = "run this where scontrol works, with slurmctld up; SLURM_CONF names another configuration";
            return vec![CheckResult::fail("slurm", error.to_string(), advice)];
        }
    };
    let mut results: Vec<CheckResult> = facts
        .findings(partition)
        .into_iter()
        .map(|finding| match finding.level {
            FindingLevel::Fine => CheckResult::ok(finding.check, finding.found),
            FindingLevel::Weak => CheckResult::warn(finding.check, finding.found, finding.advice),
            FindingLevel::Broken => CheckResult::fail(finding.check, finding.found, finding.advice),
        })
        .collect();
    results.push(agent(&facts, partition));
    results.extend(far.iter().map(|url| super::network::server(url, token)));
    results
}

/// Checks the agent of this machine against what Slurm gives the node.
fn agent(facts: &ClusterFacts, partition: &str) -> CheckResult {
    let check = "agent";
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim().split('.').next().unwrap_or_default();
    let memory = node_memory(facts, partition);
    let Some(&node_mib) = memory.get(name) else {
        return CheckResult::ok(check, "this machine is no node; run farfield doctor --cluster on each node");
    };
    match runner::read_status(&runner::agent_socket()) {
        Err(error) => {
            CheckResult::fail(check, error.to_string(), format!("farfield agent --near {node_mib}M --pool URL"))
        }
        Ok(status) if status.near_bytes >> 20 != node_mib => CheckResult::fail(
            check,
            format!("it divides {}, and Slurm gives the node {node_mib} MiB", ByteSize(status.near_bytes)),
            format!("start it with --near {node_mib}M, or change RealMemory"),
        ),
        Ok(status) => {
            CheckResult::ok(check, format!("divides {} among {} jobs", ByteSize(status.near_bytes), status.jobs.len()))
        }
    }
}

#[cfg(test)]
mod tests {
    //! Danger: Slurm starts other jobs again than those that lost their memory server, or holds others than
    //! those that were not started.
    use farfield_cluster::gate::slurm::setup;
    use farfield_pager::control::exit;

    #[test]
    fn slurm_requeues_jobs_by_the_exit_code_of_a_lost_server() {
        assert_eq!(i32::from(setup::REQUEUE_EXIT), exit::SERVER_LOST);
    }

    #[test]
    fn slurm_holds_jobs_by_the_exit_code_of_a_start_that_failed() {
        assert_eq!(i32::from(setup::HOLD_EXIT), exit::REFUSED);
    }
}
