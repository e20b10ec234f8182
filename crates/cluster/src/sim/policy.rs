//! Names of policies: a division of near memory and an order of waiting jobs.

use farfield_core::policy::cluster::{QueueOrder, SplitRule};
use std::fmt;
use std::str::FromStr;

/// Policy of a cluster.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Policy {
    /// Division of near memory; `None` uses no far memory.
    pub split: Option<SplitRule>,
    /// Least share of all jobs, instead of each class's own.
    pub least: Option<f64>,
    /// Order of waiting jobs.
    pub order: QueueOrder,
}

/// The name of a policy is not one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "no policy is called {0:?}; write near, uniform:SHARE, variable, memory-time or worth, and +long for long jobs \
     first"
)]
pub struct PolicyError(String);

/// Bound of overtaking in seconds: a job can be overtaken by what arrives within the hour after it, or
/// within the time that the longest job takes.
const WINDOW_S: f64 = 3600.0;

impl Policy {
    /// Returns the policy of the paper.
    pub const MEMORY_TIME: Policy =
        Policy { split: Some(SplitRule::MemoryTime), least: None, order: QueueOrder::Arrival };
    /// Returns the policy without far memory.
    pub const NEAR: Policy = Policy { split: None, least: None, order: QueueOrder::Arrival };
    /// Returns the paper's policy that takes the same part from all jobs.
    pub const VARIABLE: Policy = Policy { split: Some(SplitRule::Variable), least: None, order: QueueOrder::Arrival };

    /// Tells whether the policy uses far memory.
    pub fn uses_far(&self) -> bool {
        self.split.is_some()
    }
}

impl FromStr for Policy {
    type Err = PolicyError;

    fn from_str(name: &str) -> Result<Policy, PolicyError> {
        let (split, order) = match name.strip_suffix("+long") {
            Some(split) => (split, QueueOrder::LongFirst { window_s: WINDOW_S }),
            None => (name, QueueOrder::Arrival),
        };
        let policy = |split, least, order| Ok(Policy { split, least, order });
        match split {
            "near" => policy(None, None, order),
            "variable" => policy(Some(SplitRule::Variable), None, order),
            "memory-time" => policy(Some(SplitRule::MemoryTime), None, order),
            "worth" => policy(Some(SplitRule::Worth), None, QueueOrder::LongFirst { window_s: WINDOW_S }),
            _ => {
                let least = split.strip_prefix("uniform:").and_then(|share| share.parse().ok());
                let least = least.filter(|share| *share > 0.0 && *share <= 1.0);
                let least = least.ok_or_else(|| PolicyError(name.to_owned()))?;
                policy(Some(SplitRule::Uniform), Some(least), order)
            }
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.split, self.least) {
            (None, _) => f.write_str("near")?,
            (Some(SplitRule::Uniform), least) => write!(f, "uniform:{}", least.unwrap_or(1.0))?,
            (Some(SplitRule::Variable), _) => f.write_str("variable")?,
            (Some(SplitRule::MemoryTime), _) => f.write_str("memory-time")?,
            (Some(SplitRule::Worth), _) => return f.write_str("worth"),
        }
        match self.order {
            QueueOrder::Arrival => Ok(()),
            QueueOrder::LongFirst { .. } => f.write_str("+long"),
        }
    }
}

#[cfg(test)]
mod tests {
    //! Guards against a policy that is not the one whose name was given.
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for name in ["near", "near+long", "uniform:0.75", "variable", "memory-time", "memory-time+long", "worth"] {
            assert_eq!(name.parse::<Policy>().unwrap().to_string(), name);
        }
        for wrong in ["", "unifrom", "uniform", "uniform:0", "uniform:NaN", "uniform:1.1", "near+short"] {
            assert!(wrong.parse::<Policy>().unwrap_err().to_string().contains("memory-time"), "{wrong}");
        }
    }
}
