//! Division of a node's near memory among its jobs.
//!
//! The contract of all rules, which one test checks: together the jobs get no more than the node
//! has; none gets less than its lowest share; if all fits, all is near; if not, all near memory is
//! used.

mod memory_time;
#[cfg(test)]
mod oracle;
mod proportional;
#[cfg(test)]
mod tests;

use super::job::JobClass;
#[cfg(test)]
use super::job::STEPS;
use alloc::vec::Vec;
use memory_time::MemoryTime;

/// Rule by which near memory is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SplitRule {
    /// Equal shares for all, as far as their least shares allow.
    Uniform,
    /// All give up the same part of what they can spare (CFM: variable).
    Variable,
    /// Least memory-time saved per far memory-time used (CFM: memory-time), down to the floor of
    /// each class.
    MemoryTime,
    /// Memory-time with the least share of each job as the bound, which keeps the promise of its
    /// admission. Where far memory can only slow jobs, the least total time.
    Worth,
}

/// A job on a node.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct JobProgress {
    /// Index of its class.
    pub class: usize,
    /// Part of its work that is left, between 0 and 1.
    pub remaining: f64,
}

/// The least shares of the jobs do not fit into the node together: a job was admitted that should
/// not have been, or the node has become smaller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the least shares of the jobs need {least_bytes} bytes near, and the node has {memory_bytes}")]
pub struct LeastSharesExceedNode {
    /// Sum of the least shares.
    pub least_bytes: u64,
    /// Near memory of the node.
    pub memory_bytes: u64,
}

/// Divides near memory by one rule. Keeps its tables, so that a division allocates nothing.
#[derive(Clone, Debug)]
pub struct Splitter {
    rule: SplitRule,
    memory_time: MemoryTime,
}

impl Splitter {
    /// Makes a splitter for jobs of these classes.
    pub fn new(rule: SplitRule, classes: &[JobClass]) -> Splitter {
        let floor = match rule {
            SplitRule::MemoryTime => JobClass::floor,
            SplitRule::Uniform | SplitRule::Variable | SplitRule::Worth => JobClass::least,
        };
        Splitter { rule, memory_time: MemoryTime::new(classes, floor) }
    }

    /// Returns the rule.
    pub fn rule(&self) -> SplitRule {
        self.rule
    }

    /// Divides `memory_bytes` among jobs of `classes`, the classes of [`new`](Splitter::new). Writes
    /// the near share of each job.
    pub fn split(
        &mut self,
        classes: &[JobClass],
        jobs: &[JobProgress],
        memory_bytes: u64,
        shares: &mut Vec<f64>,
    ) -> Result<(), LeastSharesExceedNode> {
        let of = |job: &JobProgress| &classes[job.class];
        shares.clear();
        let asked: u64 = jobs.iter().map(|job| of(job).memory_bytes()).sum();
        if asked <= memory_bytes {
            shares.resize(jobs.len(), 1.0);
            return Ok(());
        }
        let least_bytes = jobs.iter().map(|job| of(job).least_bytes()).sum();
        if least_bytes > memory_bytes {
            return Err(LeastSharesExceedNode { least_bytes, memory_bytes });
        }
        match self.rule {
            SplitRule::Uniform => proportional::uniform(jobs.iter().map(of), memory_bytes, shares),
            SplitRule::Variable => proportional::variable(jobs.iter().map(of), asked - memory_bytes, shares),
            SplitRule::MemoryTime => {
                proportional::variable(jobs.iter().map(of), asked - memory_bytes, shares);
                self.memory_time.split(jobs, memory_bytes, shares);
            }
            SplitRule::Worth => {
                proportional::variable(jobs.iter().map(of), asked - memory_bytes, shares);
                self.memory_time.split_if_worth(jobs, memory_bytes, shares);
            }
        }
        Ok(())
    }
}
