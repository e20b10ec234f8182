//! Plans of purchases: which memory to buy for a cluster, or none.
//!
//! A plan is a scenario of [`sim`](crate::sim) with prices. Each purchase is simulated over the same
//! arrivals with the same seeds (common random numbers), so that purchases are compared trial by
//! trial. [`decide`] is pure: prices and times in, a recommendation and what would change it out.

mod decide;
mod file;
mod noise;
mod purchase;

pub use decide::{
    AnswerChange, ChangeCondition, Criteria, Decision, DecisionError, JudgedPurchase, PurchaseVerdict, TimedPurchase,
    decide,
};
pub use file::{EXAMPLE, parse};
pub use noise::{GainInterval, TRIALS_MIN};
pub use purchase::Purchase;

use crate::sim::{Policy, RunFigures, Scenario, ScenarioError, Simulator, run_trials};
use serde::{Deserialize, Serialize};

/// Time that a purchase is to shorten.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GainOf {
    /// Time until all jobs have ended: what counts for a batch.
    Makespan,
    /// Mean time from arrival to end: what counts where jobs keep arriving.
    Turnaround,
}

impl GainOf {
    /// Returns this time of a run, in seconds.
    pub fn seconds(self, run: &RunFigures) -> f64 {
        match self {
            GainOf::Makespan => run.makespan_s,
            GainOf::Turnaround => run.turnaround_mean_s,
        }
    }
}

/// Cluster, jobs, and what can be bought at which price.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Cluster as it is, with its jobs. It has far memory only if it has some already.
    pub scenario: Scenario,
    /// Policy where there is far memory; without, jobs start in the same order.
    pub policy: Policy,
    /// Purchases, of which the first is to buy nothing.
    pub purchases: Vec<Purchase>,
    /// Time that is to be shorter.
    pub gain_of: GainOf,
    /// Standard by which purchases are judged.
    pub criteria: Criteria,
    /// Name of the currency, for reports.
    pub currency: String,
}

impl Plan {
    /// Returns the cluster as it would be with a purchase, and its policy.
    pub fn with(&self, purchase: &Purchase) -> (Scenario, Policy) {
        let mut scenario = self.scenario.clone();
        scenario.shape.memory_bytes += purchase.near_bytes;
        scenario.far_bytes += purchase.far_bytes;
        scenario.memory_servers += purchase.nodes_taken;
        let policy = if scenario.far_bytes > 0 { self.policy } else { Policy { split: None, ..self.policy } };
        (scenario, policy)
    }

    /// Simulates the cluster with a purchase: `trials` runs, of which the first has this seed.
    /// `after_each` is told how many are done.
    pub fn simulate(
        &self,
        purchase: &Purchase,
        seed: u64,
        trials: usize,
        after_each: impl FnMut(usize),
    ) -> Result<Vec<RunFigures>, ScenarioError> {
        let (scenario, policy) = self.with(purchase);
        run_trials(&mut Simulator::new(&scenario, policy)?, seed, trials, after_each)
    }
}

#[cfg(test)]
mod tests {
    //! Guards against purchases that are compared over different jobs.
    use super::*;

    fn example() -> Plan {
        parse(EXAMPLE, |_| Err("none".into())).unwrap()
    }

    #[test]
    fn purchases_meet_the_same_arrivals() {
        let plan = example();
        let arrivals = |purchase: &Purchase| {
            let (scenario, policy) = plan.with(purchase);
            let mut simulator = Simulator::new(&scenario, policy).unwrap();
            simulator.run(7).unwrap();
            simulator.records().iter().map(|job| (job.class, job.arrival_s.to_bits())).collect::<Vec<_>>()
        };
        let jobs = arrivals(&plan.purchases[0]);
        assert!(jobs.len() > 100 && plan.purchases.len() > 3);
        for purchase in &plan.purchases[1..] {
            assert!(arrivals(purchase) == jobs, "{}", purchase.name);
        }
    }

    #[test]
    fn a_purchase_changes_the_cluster_by_what_is_bought() {
        let plan = example();
        let purchase = |near_bytes, far_bytes, nodes_taken| Purchase {
            name: String::new(),
            price: 1.0,
            near_bytes,
            far_bytes,
            nodes_taken,
        };
        let (scenario, policy) = plan.with(&purchase(3, 0, 0));
        assert_eq!(scenario.shape.memory_bytes, plan.scenario.shape.memory_bytes + 3);
        assert!(!policy.uses_far() && policy.order == plan.policy.order, "there is no far memory");
        let (scenario, policy) = plan.with(&purchase(0, 5, 1));
        assert_eq!((scenario.far_bytes, scenario.memory_servers, policy), (5, 1, plan.policy));
        assert_eq!(plan.with(&plan.purchases[0]).0, plan.scenario);
        let all_taken = purchase(0, 5, plan.scenario.nodes);
        assert!(matches!(plan.simulate(&all_taken, 1, 1, |_| {}), Err(ScenarioError::Shape(_))));
    }
}
