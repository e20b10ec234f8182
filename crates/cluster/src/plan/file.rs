//! Plan files: a scenario file with prices in its table `purchase`.

use super::purchase::purchases;
use super::{Criteria, GainOf, Plan};
use crate::sim::{self, Arrivals, FileError, Policy};
use serde::Deserialize;
use serde::de::IgnoredAny;

/// A plan to begin with.
pub const EXAMPLE: &str = include_str!("../../scenarios/plan.toml");

/// The part of a file that a scenario does not read.
#[derive(Debug, Deserialize)]
struct PlanFile {
    far_mib: Option<IgnoredAny>,
    memory_servers: Option<IgnoredAny>,
    purchase: Option<PurchaseTable>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct PurchaseTable {
    #[serde(default)]
    policy: PolicyName,
    has_far: Option<bool>,
    gain_of: Option<GainOf>,
    budget: Option<Amount>,
    #[serde(default = "one_percent")]
    least_gain_percent: Amount,
    percent_worth: Option<Amount>,
    #[serde(default)]
    currency: String,
    #[serde(default = "yes")]
    both: bool,
    #[serde(default)]
    dimm: Vec<DimmOffer>,
    #[serde(default)]
    server: Vec<ServerOffer>,
}

/// DIMMs of one kind, of which each node gets the same number.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DimmOffer {
    pub(super) gib: WholeSize,
    pub(super) price: Amount,
    #[serde(default)]
    pub(super) free_slots: SlotCount,
    #[serde(default = "one_dimm")]
    pub(super) step: WholeSize,
    #[serde(default)]
    pub(super) used_slots: SlotCount,
    pub(super) used_gib: Option<WholeSize>,
}

/// Memory server that is offered in several sizes.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ServerOffer {
    pub(super) gib: Vec<WholeSize>,
    pub(super) base_price: Amount,
    #[serde(default)]
    pub(super) price_per_gib: Amount,
    #[serde(default)]
    pub(super) takes_nodes: SlotCount,
}

/// Number that is not negative, of money or percent.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(try_from = "f64")]
pub(super) struct Amount(f64);

const AMOUNT_MAX: f64 = 1e12;

impl Amount {
    pub(super) fn get(self) -> f64 {
        self.0
    }
}

impl TryFrom<f64> for Amount {
    type Error = String;

    fn try_from(number: f64) -> Result<Amount, String> {
        // NaN is in no range.
        match (0.0..=AMOUNT_MAX).contains(&number) {
            true => Ok(Amount(number.abs())),
            false => Err(format!("must be a number from 0 to 10^12, not {number}")),
        }
    }
}

/// Number of GiB, or of DIMMs that are bought together: at least 1.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(try_from = "i64")]
pub(super) struct WholeSize(u64);

const SIZE_MAX: u64 = 1 << 20;

impl WholeSize {
    pub(super) fn get(self) -> u64 {
        self.0
    }
}

impl TryFrom<i64> for WholeSize {
    type Error = String;

    fn try_from(number: i64) -> Result<WholeSize, String> {
        let size = u64::try_from(number).ok().filter(|size| (1..=SIZE_MAX).contains(size));
        size.map(WholeSize).ok_or_else(|| format!("must be a whole number from 1 to {SIZE_MAX}, not {number}"))
    }
}

/// Number of slots of a node, or of nodes.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(try_from = "i64")]
pub(super) struct SlotCount(u64);

const SLOTS_MAX: u64 = 1024;

impl SlotCount {
    pub(super) fn get(self) -> u64 {
        self.0
    }
}

impl TryFrom<i64> for SlotCount {
    type Error = String;

    fn try_from(number: i64) -> Result<SlotCount, String> {
        let count = u64::try_from(number).ok().filter(|count| *count <= SLOTS_MAX);
        count.map(SlotCount).ok_or_else(|| format!("must be a whole number from 0 to {SLOTS_MAX}, not {number}"))
    }
}

/// Name of a policy, checked where it is read so that an error names its line.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(try_from = "String")]
struct PolicyName(Policy);

impl Default for PolicyName {
    fn default() -> PolicyName {
        PolicyName(Policy::MEMORY_TIME)
    }
}

impl TryFrom<String> for PolicyName {
    type Error = sim::PolicyError;

    fn try_from(name: String) -> Result<PolicyName, sim::PolicyError> {
        name.parse().map(PolicyName)
    }
}

fn one_percent() -> Amount {
    Amount(1.0)
}

fn one_dimm() -> WholeSize {
    WholeSize(1)
}

fn yes() -> bool {
    true
}

/// Most purchases of a plan, so that a typing error does not simulate for a day.
const PURCHASES_MAX: usize = 100;
const CURRENCY_CHARACTERS_MAX: usize = 8;

/// Reads a plan file. `read` returns the text of a file of recorded arrivals.
pub fn parse(text: &str, read: impl Fn(&str) -> Result<String, String>) -> Result<Plan, FileError> {
    let mut scenario = sim::parse(text, read)?;
    let file: PlanFile = toml::from_str(text).map_err(|error| FileError::Syntax(error.to_string()))?;
    let has_far = file.has_far()?;
    let missing = || value("purchase", "is missing: a plan is a scenario with prices; `farfield plan --example`");
    let table = file.purchase.ok_or_else(missing)?;
    table.check()?;
    if !has_far {
        (scenario.far_bytes, scenario.memory_servers) = (0, 0);
    }
    let nodes = scenario.nodes.saturating_sub(scenario.memory_servers);
    let purchases = purchases(&table.dimm, &table.server, table.both, nodes);
    match purchases.len() - 1 {
        0 => return Err(value("purchase", "offers nothing: it needs a `dimm` with slots to go to, or a `server`")),
        1..=PURCHASES_MAX => {}
        count => {
            let message =
                format!("makes {count} purchases, more than {PURCHASES_MAX}: offer less, or set both = false");
            return Err(value("purchase", &message));
        }
    }
    let is_batch = matches!(scenario.arrivals, Arrivals::Window(_));
    Ok(Plan {
        policy: table.policy.0,
        purchases,
        gain_of: table.gain_of.unwrap_or(if is_batch { GainOf::Makespan } else { GainOf::Turnaround }),
        criteria: Criteria {
            budget: table.budget.map(Amount::get),
            least_gain: table.least_gain_percent.get() / 100.0,
            percent_worth: table.percent_worth.map(Amount::get),
        },
        currency: table.currency,
        scenario,
    })
}

impl PlanFile {
    /// Tells whether the cluster has far memory already. A file that names some has to say.
    fn has_far(&self) -> Result<bool, FileError> {
        let said = self.purchase.as_ref().and_then(|table| table.has_far);
        if said.is_none() && self.purchase.is_some() && (self.far_mib.is_some() || self.memory_servers.is_some()) {
            let message = "must say whether the cluster has the `far_mib` and `memory_servers` of this file already \
                           (true), or whether only `farfield sim` uses them (false)";
            return Err(value("purchase.has_far", message));
        }
        Ok(said.unwrap_or(false))
    }
}

impl PurchaseTable {
    fn check(&self) -> Result<(), FileError> {
        if !self.policy.0.uses_far() && (!self.server.is_empty() || self.has_far == Some(true)) {
            return Err(value("purchase.policy", "must use far memory, for a memory server is of no use without"));
        }
        if self.currency.chars().count() > CURRENCY_CHARACTERS_MAX || self.currency.contains(char::is_control) {
            return Err(value("purchase.currency", "must have at most eight letters, like \"EUR\""));
        }
        if self.dimm.iter().any(|row| (row.used_slots.get() > 0) != row.used_gib.is_some()) {
            return Err(value("purchase.dimm", "needs both `used_slots` and `used_gib` if DIMMs are to be replaced"));
        }
        if self.server.iter().any(|row| row.gib.is_empty()) {
            return Err(value("purchase.server", "needs sizes: gib = [256, 512]"));
        }
        Ok(())
    }
}

fn value(key: &str, message: &str) -> FileError {
    FileError::Value { key: key.to_owned(), message: message.to_owned() }
}

#[cfg(test)]
mod tests {
    //! Guards against a plan that buys something else than its file says, or at another price.
    use super::*;

    const PLAN: &str = r#"name = "ours"
nodes = 4
cores = 8
near_mib = 1024
[arrivals]
window_s = 5
[purchase]
budget = 900
currency = "EUR"
[[purchase.dimm]]
gib = 2
price = 10
free_slots = 4
step = 2
[[purchase.server]]
gib = [8, 16]
base_price = 100
price_per_gib = 2.5
[[class]]
name = "train"
count = 10
cores = 2
memory_mib = 600
least = 0.5
seconds = 100
slowdown = [[0.5, 1.5]]
"#;

    fn none(_: &str) -> Result<String, String> {
        Err("none".into())
    }

    fn plan(from: &str, to: &str) -> Result<Plan, FileError> {
        assert!(PLAN.contains(from), "{from}");
        parse(&PLAN.replace(from, to), none)
    }

    /// Purchases as price, GiB near in each node, GiB far.
    fn offers(plan: &Plan) -> Vec<(f64, u64, u64)> {
        plan.purchases.iter().map(|it| (it.price, it.near_bytes >> 30, it.far_bytes >> 30)).collect()
    }

    #[test]
    fn a_plan_offers_dimms_servers_and_both() {
        let plan = plan("budget", "budget").unwrap();
        let alone = [(0.0, 0, 0), (80.0, 4, 0), (160.0, 8, 0), (120.0, 0, 8), (140.0, 0, 16)];
        let both = [(200.0, 4, 8), (280.0, 8, 8), (220.0, 4, 16), (300.0, 8, 16)];
        assert_eq!(offers(&plan), [&alone[..], &both[..]].concat());
        assert_eq!(plan.purchases[5].name, "2 x 2 GiB in each node + a memory server of 8 GiB");
        assert_eq!((plan.policy, plan.gain_of, plan.currency.as_str()), (Policy::MEMORY_TIME, GainOf::Makespan, "EUR"));
        let criteria = Criteria { budget: Some(900.0), least_gain: 0.01, percent_worth: None };
        assert_eq!(plan.criteria, criteria);
        let alone_only = self::plan("budget", "both = false\nbudget").unwrap();
        assert_eq!(offers(&alone_only), alone);
        // The same file is a scenario.
        assert_eq!(sim::parse(PLAN, none).unwrap(), plan.scenario);
    }

    #[test]
    fn larger_dimms_replace_smaller_ones_when_slots_are_full() {
        let full = plan("free_slots = 4\nstep = 2", "free_slots = 1\nused_slots = 2\nused_gib = 1").unwrap();
        let dimms: Vec<_> = offers(&full).into_iter().filter(|offer| offer.2 == 0).collect();
        assert_eq!(dimms, [(0.0, 0, 0), (40.0, 2, 0), (80.0, 3, 0), (120.0, 4, 0)]);
        assert_eq!(full.purchases[3].name, "3 x 2 GiB in each node for 2 x 1 GiB");
        // DIMMs that are no larger than those they replace add nothing.
        let same = plan("free_slots = 4\nstep = 2", "used_slots = 2\nused_gib = 2").unwrap();
        assert_eq!(offers(&same), [(0.0, 0, 0), (120.0, 0, 8), (140.0, 0, 16)]);
    }

    #[test]
    fn a_node_that_serves_memory_needs_no_dimms() {
        let plan = plan("base_price", "takes_nodes = 1\nbase_price").unwrap();
        assert_eq!(offers(&plan)[5], (60.0 + 120.0, 4, 8), "DIMMs for three nodes of four");
        assert_eq!(plan.purchases[3].name, "a memory server of 8 GiB in place of a node");
    }

    #[test]
    fn far_memory_that_is_there_already_is_said_to_be() {
        let error = plan("nodes = 4", "nodes = 4\nfar_mib = 512").unwrap_err().to_string();
        assert!(error.contains("has_far"), "{error}");
        let there = "nodes = 4\nfar_mib = 512\nmemory_servers = 1";
        let has = parse(&PLAN.replace("nodes = 4", there).replace("budget", "has_far = true\nbudget"), none).unwrap();
        assert_eq!((has.scenario.far_bytes, has.scenario.memory_servers), (512 << 20, 1));
        assert_eq!(offers(&has)[1], (60.0, 4, 0), "the memory server gets no DIMMs");
        let not = parse(&PLAN.replace("nodes = 4", there).replace("budget", "has_far = false\nbudget"), none).unwrap();
        assert_eq!((not.scenario.far_bytes, not.scenario.memory_servers), (0, 0));
    }

    #[test]
    fn what_counts_follows_from_the_arrivals() {
        assert_eq!(plan("window_s = 5", "per_s = 0.1").unwrap().gain_of, GainOf::Turnaround);
        assert_eq!(plan("budget", "gain_of = \"turnaround\"\nbudget").unwrap().gain_of, GainOf::Turnaround);
    }

    #[test]
    fn mistakes_are_named_with_their_lines() {
        let check = |from: &str, to: &str, complaints: &[&str]| {
            let error = plan(from, to).unwrap_err().to_string();
            for complaint in complaints {
                assert!(error.contains(complaint), "{to}: no {complaint:?} in {error}");
            }
        };
        check("price = 10\n", "price = nan\n", &["line 12", "10^12", "NaN"]);
        check("price = 10\n", "price = -10\n", &["line 12", "-10"]);
        check("price = 10\n", "price = inf\n", &["line 12", "inf"]);
        check("price = 10\n", "price = \"ten\"\n", &["line 12", "string"]);
        check("price = 10\n", "", &["price"]);
        check("base_price = 100", "base_price = nan", &["line 17"]);
        check("price_per_gib = 2.5", "price_per_gib = -2.5", &["line 18"]);
        check("budget = 900", "budget = -1", &["line 8"]);
        check("budget = 900", "budgett = 900", &["line 8", "budgett"]);
        check("budget = 900", "least_gain_percent = nan", &["line 8"]);
        check("budget = 900", "percent_worth = inf", &["line 8"]);
        check("budget = 900", "policy = \"best\"", &["line 8", "memory-time"]);
        check("budget = 900", "policy = \"near\"", &["purchase.policy"]);
        check("budget = 900", "gain_of = \"money\"", &["line 8", "turnaround"]);
        check("gib = 2\n", "gib = 0\n", &["line 11", "from 1"]);
        check("gib = 2\n", "gib = 1.5\n", &["line 11"]);
        check("step = 2", "step = 0", &["line 14"]);
        check("free_slots = 4", "free_slots = -4", &["line 13"]);
        check("free_slots = 4", "free_slots = 9999", &["line 13", "1024"]);
        check("free_slots = 4", "free_slots = 400", &["more than 100"]);
        check("free_slots = 4", "used_slots = 4", &["used_gib"]);
        check("gib = [8, 16]", "gib = []", &["purchase.server"]);
        check("gib = [8, 16]", "gib = [8, -16]", &["line 16"]);
        check("\"EUR\"", "\"a currency of the moon\"", &["currency"]);
        let (before, after) = PLAN.split_once("[purchase]").unwrap();
        let (_, after) = after.split_once("[[class]]").unwrap();
        let bare = |table: &str| parse(&format!("{before}{table}[[class]]{after}"), none).unwrap_err().to_string();
        assert!(bare("").contains("farfield plan --example"));
        assert!(bare("[purchase]\n").contains("offers nothing"));
        assert!(plan("nodes = 4", "nods = 4").unwrap_err().to_string().contains("nods"));
    }

    #[test]
    fn the_example_is_a_plan() {
        let plan = parse(EXAMPLE, none).unwrap();
        assert!(plan.purchases.len() > 5 && plan.criteria.budget.is_some());
    }
}
