//! `farfield plan`: which memory to buy for a cluster, or none.

use crate::sim::{erase, progress, read_beside};
use anyhow::{Context, Result};
use clap::Args;
use farfield_cluster::plan::{
    self, ChangeCondition, Decision, EXAMPLE, GainInterval, GainOf, Plan, Purchase, PurchaseVerdict, TRIALS_MIN,
    TimedPurchase,
};
use farfield_cluster::sim::{Arrivals, RunFigures, RunSummary};
use farfield_pager::runner::ByteSize;
use serde::Serialize;
use std::fmt::Write as _;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Say which memory to buy for a cluster: DIMMs for its nodes, a memory server, both or nothing.
///
/// Each purchase is simulated over the same jobs with the same seeds.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct PlanArgs {
    /// Plan: a scenario of `farfield sim` with prices
    #[arg(value_name = "FILE", required_unless_present = "example")]
    file: Option<PathBuf>,
    /// Number of runs of each purchase; each has a seed of its own
    #[arg(long, value_name = "N", default_value_t = 15,
          value_parser = clap::value_parser!(u32).range(TRIALS_MIN as i64..=10_000))]
    trials: u32,
    /// Seed of the first run; equal seeds give equal results
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Print one JSON object, for programs
    #[arg(long)]
    json: bool,
    /// Print a plan to begin with
    #[arg(long, conflicts_with_all = ["file", "json"])]
    example: bool,
}

const EXAMPLES: &str = "\
Examples:
  farfield plan --example > ours.toml                     A plan to begin with: docs/cli.md has the format
  farfield plan ours.toml                                 What to buy, and what would change the answer
  farfield plan ours.toml --trials 50                     Where the trials cannot tell
  farfield plan ours.toml --json | jq -r .answer
  farfield sim run ours.toml                              The same cluster and jobs, without prices

Exit code: 0 whatever the answer is, 1 if there is none.";

/// Result of `--json`.
#[derive(Debug, Serialize)]
struct PlanResults<'a> {
    version: &'static str,
    plan: &'a str,
    seed: u64,
    trials: usize,
    jobs: usize,
    memory_to_cores: f64,
    gain_of: GainOf,
    currency: &'a str,
    budget: Option<f64>,
    least_gain: f64,
    percent_worth: Option<f64>,
    purchases: Vec<PurchaseResult<'a>>,
    /// Index in `purchases`.
    choice: usize,
    answer: String,
    changes: Vec<ChangeResult>,
    notes: Vec<String>,
}

/// Purchase with all that was found out about it.
#[derive(Debug, Serialize)]
struct PurchaseResult<'a> {
    name: &'a str,
    price: f64,
    near_bytes_per_node: u64,
    far_bytes: u64,
    nodes_taken: u32,
    gain: GainInterval,
    price_per_percent: Option<f64>,
    is_on_front: bool,
    verdict: PurchaseVerdict,
    runs: RunSummary,
}

/// Condition under which the answer is another one.
#[derive(Debug, Serialize)]
struct ChangeResult {
    condition: ChangeCondition,
    /// Index in `purchases`.
    then: usize,
    text: String,
}

/// Runs the command.
pub(crate) fn run(args: &PlanArgs) -> Result<()> {
    let text = match &args.file {
        Some(file) => answer(args, file)?,
        None => EXAMPLE.to_owned(),
    };
    std::io::stdout().write_all(text.as_bytes())?;
    Ok(())
}

fn answer(args: &PlanArgs, file: &Path) -> Result<String> {
    let name = file.display().to_string();
    let text = std::fs::read_to_string(file)
        .with_context(|| format!("cannot read {name} (`farfield plan --example` prints a plan)"))?;
    let plan = plan::parse(&text, |beside| read_beside(file, beside)).context(name)?;
    let runs = simulate(&plan, args)?;
    let timed = |(purchase, runs): (&Purchase, &Vec<RunFigures>)| TimedPurchase {
        price: purchase.price,
        times_s: runs.iter().map(|run| plan.gain_of.seconds(run)).collect(),
    };
    let timed: Vec<TimedPurchase> = plan.purchases.iter().zip(&runs).map(timed).collect();
    let decision = plan::decide(&timed, &plan.criteria)?;
    let results = results(&plan, args, &runs, &decision);
    Ok(if args.json { serde_json::to_string(&results)? + "\n" } else { table(&plan, &results) })
}

fn simulate(plan: &Plan, args: &PlanArgs) -> Result<Vec<Vec<RunFigures>>> {
    let all = plan.purchases.len() * args.trials as usize;
    let mut runs = Vec::new();
    for purchase in &plan.purchases {
        let before = runs.len() * args.trials as usize;
        let progress = |done| progress(&format!("{} of {all} runs: {}", before + done, purchase.name));
        let trials = plan.simulate(purchase, args.seed, args.trials as usize, progress);
        erase();
        runs.push(trials.with_context(|| format!("{}, with {}", plan.scenario.name, purchase.name))?);
    }
    Ok(runs)
}

fn results<'a>(plan: &'a Plan, args: &PlanArgs, runs: &[Vec<RunFigures>], decision: &Decision) -> PlanResults<'a> {
    let jobs = match &plan.scenario.arrivals {
        Arrivals::Recorded(arrivals) => arrivals.len(),
        _ => plan.scenario.counts.iter().sum(),
    };
    let purchases = plan.purchases.iter().zip(runs).zip(&decision.purchases);
    let purchases = purchases.map(|((purchase, runs), judged)| PurchaseResult {
        name: &purchase.name,
        price: purchase.price,
        near_bytes_per_node: purchase.near_bytes,
        far_bytes: purchase.far_bytes,
        nodes_taken: purchase.nodes_taken,
        gain: judged.gain,
        price_per_percent: judged.price_per_percent,
        is_on_front: judged.is_on_front,
        verdict: judged.verdict,
        runs: RunSummary::of(runs, (&plan.scenario.name, &plan.with(purchase).1.to_string()), args.seed, jobs),
    });
    let changes = decision.changes.iter().map(|change| ChangeResult {
        condition: change.condition,
        then: change.then,
        text: change_text(plan, decision, change.condition, change.then),
    });
    PlanResults {
        version: env!("CARGO_PKG_VERSION"),
        plan: &plan.scenario.name,
        seed: args.seed,
        trials: args.trials as usize,
        jobs,
        memory_to_cores: plan.scenario.memory_to_cores(),
        gain_of: plan.gain_of,
        currency: &plan.currency,
        budget: plan.criteria.budget,
        least_gain: plan.criteria.least_gain,
        percent_worth: plan.criteria.percent_worth,
        purchases: purchases.collect(),
        choice: decision.choice,
        answer: answer_text(plan, decision, args.trials),
        changes: changes.collect(),
        notes: notes(plan, decision, runs),
    }
}

/// Returns an amount of money with its currency.
fn money(plan: &Plan, amount: f64) -> String {
    let number = if amount >= 100.0 || amount.fract() == 0.0 { format!("{amount:.0}") } else { format!("{amount:.2}") };
    format!("{number} {}", plan.currency).trim_end().to_owned()
}

fn percent(part: f64) -> f64 {
    // What is nothing but rounding is 0, and has no sign.
    if part.abs() < 5e-5 { 0.0 } else { part * 100.0 }
}

fn gain_name(gain_of: GainOf) -> &'static str {
    match gain_of {
        GainOf::Makespan => "makespan",
        GainOf::Turnaround => "mean turnaround",
    }
}

/// Says in a sentence what to buy.
fn answer_text(plan: &Plan, decision: &Decision, trials: u32) -> String {
    if decision.choice == 0 {
        return nothing_text(plan, decision, trials);
    }
    let (purchase, judged) = (&plan.purchases[decision.choice], &decision.purchases[decision.choice]);
    let gain = judged.gain;
    let each = judged.price_per_percent.filter(|price| *price > 0.0);
    format!(
        "Buy {} for {}: a gain of {:.1} % in {} (95 %: {:.1} to {:.1} %){}.",
        purchase.name,
        money(plan, purchase.price),
        percent(gain.median),
        gain_name(plan.gain_of),
        percent(gain.low),
        percent(gain.high),
        each.map_or(String::new(), |price| format!(", {} for each percent", money(plan, price))),
    )
}

/// Says why to buy nothing: the reason of the purchase that came closest to being worth it.
fn nothing_text(plan: &Plan, decision: &Decision, trials: u32) -> String {
    let offered = || decision.purchases.iter().enumerate().skip(1);
    let closest = offered().map(|(_, purchase)| purchase.verdict).max().unwrap_or(PurchaseVerdict::Nothing);
    let least = percent(plan.criteria.least_gain);
    let largest = offered().max_by(|a, b| a.1.gain.median.total_cmp(&b.1.gain.median));
    let reason = match closest {
        PurchaseVerdict::TooDear => {
            let worth = plan.criteria.percent_worth.unwrap_or(0.0);
            format!("what gains {least} % costs more than {} for each percent", money(plan, worth))
        }
        PurchaseVerdict::OverBudget => {
            let budget = plan.criteria.budget.unwrap_or(0.0);
            format!("what gains {least} % costs more than the budget of {}", money(plan, budget))
        }
        PurchaseVerdict::WithinNoise => {
            format!("what gains {least} % does so within the noise of {trials} trials")
        }
        _ => match largest.filter(|(_, purchase)| purchase.gain.median > 0.0) {
            Some((index, purchase)) => format!(
                "no purchase gains {least} % in {}; the largest gain is {:.1} %, of {}",
                gain_name(plan.gain_of),
                percent(purchase.gain.median),
                plan.purchases[index].name
            ),
            None => format!("no purchase gains anything in {}", gain_name(plan.gain_of)),
        },
    };
    format!("Buy nothing: {reason}.")
}

fn change_text(plan: &Plan, decision: &Decision, condition: ChangeCondition, then: usize) -> String {
    let purchase = &plan.purchases[then];
    let gain = percent(decision.purchases[then].gain.median);
    let then = match then {
        0 => "nothing".to_owned(),
        _ => format!("{} ({gain:.1} % for {})", purchase.name, money(plan, purchase.price)),
    };
    match condition {
        ChangeCondition::LeastGainAbove(least) => format!("To gain more than {:.1} %: {then}", percent(least)),
        ChangeCondition::LeastGainAtMost(least) => format!("If {:.1} % is enough: {then}", percent(least)),
        ChangeCondition::BudgetAtLeast(budget) => format!("With a budget of {}: {then}", money(plan, budget)),
        ChangeCondition::BudgetBelow(budget) => format!("With less than {}: {then}", money(plan, budget)),
        ChangeCondition::PercentWorthAbove(worth) => {
            format!("If a percent is worth more than {}: {then}", money(plan, worth))
        }
        ChangeCondition::PriceAbove(price) => format!("If it costs more than {}: {then}", money(plan, price)),
        ChangeCondition::PriceBelow(price) => format!("If it costs less than {}: {then}", money(plan, price)),
        ChangeCondition::MoreTrials => format!("More trials may tell from noise: {then}"),
    }
}

/// Part of bought far memory that is unused when a smaller server is worth a look.
const UNUSED: f64 = 0.1;

/// Says what a reader should know before the money is spent.
fn notes(plan: &Plan, decision: &Decision, runs: &[Vec<RunFigures>]) -> Vec<String> {
    let mut notes = Vec::new();
    let (scenario, _) = plan.with(&plan.purchases[decision.choice]);
    let peak = runs[decision.choice].iter().map(|run| run.far_peak_bytes).fold(0.0, f64::max);
    if plan.purchases[decision.choice].far_bytes > 0 && peak < scenario.far_bytes as f64 * (1.0 - UNUSED) {
        notes.push(format!(
            "Jobs had at most {} of the far memory: a smaller memory server may do.",
            ByteSize(peak as u64)
        ));
    }
    if matches!(plan.scenario.arrivals, Arrivals::Recorded(_)) {
        notes.push(
            "Arrivals are recorded: trials differ only in which node is tried first, and say nothing of other weeks."
                .into(),
        );
    }
    notes
}

fn table(plan: &Plan, results: &PlanResults<'_>) -> String {
    let scenario = &plan.scenario;
    let mut text = format!(
        "{}: {} jobs that need {:.2} times as much memory as cores, on {} nodes of {} cores and {}\n\
         policy where there is far memory: {}; gain in {}, {} trials\n\n",
        scenario.name,
        results.jobs,
        results.memory_to_cores,
        scenario.nodes - scenario.memory_servers,
        scenario.shape.cores,
        ByteSize(scenario.shape.memory_bytes),
        plan.policy,
        gain_name(plan.gain_of),
        results.trials,
    );
    let width = results.purchases.iter().map(|purchase| purchase.name.chars().count()).max().unwrap_or(0);
    let _ = writeln!(
        text,
        "   {:<width$} {:>9} {:>7} {:>16} {:>11} {:>12} {:>11} {:>12} {:>7} {:>9}",
        "purchase",
        "price",
        "gain",
        "95 %",
        "per percent",
        "makespan s",
        "turnaround",
        "slowdown p50",
        "p99",
        "far peak"
    );
    for (index, purchase) in results.purchases.iter().enumerate() {
        let is_nothing = purchase.verdict == PurchaseVerdict::Nothing;
        let or_dash = |text: String| if is_nothing { "-".to_owned() } else { text };
        let gain = purchase.gain;
        let _ = writeln!(
            text,
            "{}{} {:<width$} {:>9} {:>7} {:>16} {:>11} {:>12.0} {:>11.0} {:>11.1}% {:>6.1}% {:>9}{}",
            if index == results.choice { ">" } else { " " },
            if purchase.is_on_front { "*" } else { " " },
            purchase.name,
            format!("{:.0}", purchase.price),
            or_dash(format!("{:+.1}%", percent(gain.median))),
            or_dash(format!("{:+.1} to {:+.1}%", percent(gain.low), percent(gain.high))),
            purchase.price_per_percent.map_or("-".into(), |price| format!("{price:.0}")),
            purchase.runs.makespan_s.median,
            purchase.runs.turnaround_mean_s.median,
            percent(purchase.runs.slowdown_p50.median),
            percent(purchase.runs.slowdown_p99.median),
            ByteSize(purchase.runs.far_peak_bytes.median as u64).to_string(),
            match purchase.verdict {
                PurchaseVerdict::TooLittle => "  too little",
                PurchaseVerdict::WithinNoise => "  within noise",
                PurchaseVerdict::OverBudget => "  over budget",
                PurchaseVerdict::TooDear => "  too dear",
                PurchaseVerdict::Nothing | PurchaseVerdict::WorthIt => "",
            },
        );
    }
    let _ = writeln!(text, "\nMedians; > answer, * no other gains as much for as little.\n\n{}", results.answer);
    for line in results.changes.iter().map(|change| &change.text) {
        let _ = writeln!(text, "  {line}");
    }
    for note in &results.notes {
        let _ = writeln!(text, "{note}");
    }
    text
}
