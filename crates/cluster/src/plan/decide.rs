//! Decision of a plan: which purchase, and what would change the answer.
//!
//! Pure: prices and times of trials in, a recommendation out. The first purchase is to buy nothing.
//! A purchase is worth it if its median gain reaches the least gain that was asked for, if the gain
//! is beyond the noise of the trials, and if the budget and the worth of a percent allow its price.
//! Among those the one with the lowest price for each percent, beyond what is free, is best or, if
//! a percent has a worth, the one whose gain is worth most beyond its price. A cheaper one that the
//! trials cannot tell from the best is preferred to it.

use super::noise::{GainInterval, TRIALS_MIN};
use serde::Serialize;

/// Price of a purchase, and how long all took with it.
#[derive(Clone, Debug, PartialEq)]
pub struct TimedPurchase {
    /// Price of all of it.
    pub price: f64,
    /// Seconds of each trial. Trials of all purchases have the same seeds, in the same order.
    pub times_s: Vec<f64>,
}

/// Standard by which purchases are judged.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Criteria {
    /// Most that a purchase may cost.
    pub budget: Option<f64>,
    /// Least gain that is worth a purchase, as a part: 0.03 is 3 %.
    pub least_gain: f64,
    /// Worth of each percent gained. `None`: unknown.
    pub percent_worth: Option<f64>,
}

/// Judgement of one purchase, from the farthest to the closest to a recommendation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PurchaseVerdict {
    /// To buy nothing.
    Nothing,
    /// The median gain is less than the least gain.
    TooLittle,
    /// The gain is within the noise of the trials.
    WithinNoise,
    /// The price is above the budget.
    OverBudget,
    /// The gain is worth less than the price.
    TooDear,
    /// The purchase is worth its price.
    WorthIt,
}

/// Purchase as it compares with buying nothing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct JudgedPurchase {
    /// Gain over buying nothing.
    pub gain: GainInterval,
    /// Price for each percent of the median gain, if there is a gain.
    pub price_per_percent: Option<f64>,
    /// Whether no other purchase gains at least as much for at most the price, by medians (Pareto
    /// front).
    pub is_on_front: bool,
    /// Judgement.
    pub verdict: PurchaseVerdict,
}

/// Recommendation.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// Judgement of each purchase, in their order.
    pub purchases: Vec<JudgedPurchase>,
    /// Index of the purchase to make; 0 is nothing.
    pub choice: usize,
    /// Changes that would lead to another answer.
    pub changes: Vec<AnswerChange>,
}

/// Another answer, and when it would be given.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AnswerChange {
    /// Condition.
    pub condition: ChangeCondition,
    /// Index of the purchase that would then be recommended.
    pub then: usize,
}

/// Condition of another answer. Only one thing changes at a time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ChangeCondition {
    /// The least gain is above this part.
    LeastGainAbove(f64),
    /// The least gain is at most this part.
    LeastGainAtMost(f64),
    /// The budget is at least this amount.
    BudgetAtLeast(f64),
    /// The budget is below this amount.
    BudgetBelow(f64),
    /// Each percent gained is worth more than this amount.
    PercentWorthAbove(f64),
    /// The recommended purchase costs more than this amount.
    PriceAbove(f64),
    /// The other purchase costs less than this amount.
    PriceBelow(f64),
    /// More trials tell the gain of the other purchase from noise.
    MoreTrials,
}

/// Reason why nothing can be decided.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum DecisionError {
    /// The first purchase must be the one of nothing.
    #[error("the first purchase must be to buy nothing, for nothing")]
    NothingToCompare,
    /// A price, a budget or another amount is not a number of at least 0.
    #[error("{what} must be a number of at least 0, not {amount}")]
    Amount {
        /// Name of the amount.
        what: &'static str,
        /// Amount that was given.
        amount: f64,
    },
    /// A run took no time, for ever, or not a number.
    #[error("a run takes a number of seconds above 0, not {0}")]
    Time(f64),
    /// The noise of so few trials cannot be judged, or purchases have different numbers of them.
    #[error("each purchase needs the same number of trials, at least {TRIALS_MIN}; one has {0}")]
    Trials(usize),
}

/// Decides which of the purchases to make, and what would change that.
pub fn decide(purchases: &[TimedPurchase], criteria: &Criteria) -> Result<Decision, DecisionError> {
    let market = Market::of(purchases, criteria)?;
    let choice = market.choose(criteria);
    let judged = (0..purchases.len()).map(|index| market.judged(index, criteria)).collect();
    let changes = if choice == 0 { market.instead_of_nothing(criteria) } else { market.instead_of(choice, criteria) };
    Ok(Decision { purchases: judged, choice, changes })
}

/// Purchases whose numbers are numbers.
struct Market<'a> {
    purchases: &'a [TimedPurchase],
    prices: Vec<f64>,
    /// Gains over buying nothing.
    gains: Vec<GainInterval>,
}

/// Halvings until the price at which an answer changes is known.
const HALVINGS: usize = 60;

impl<'a> Market<'a> {
    fn of(purchases: &'a [TimedPurchase], criteria: &Criteria) -> Result<Market<'a>, DecisionError> {
        let Some(nothing) = purchases.first().filter(|nothing| nothing.price == 0.0) else {
            return Err(DecisionError::NothingToCompare);
        };
        let amounts = [("a budget", criteria.budget), ("the worth of a percent", criteria.percent_worth)];
        let amounts = amounts.into_iter().filter_map(|(what, amount)| Some((what, amount?)));
        let amounts = amounts.chain([("the least gain", criteria.least_gain)]);
        let mut amounts = amounts.chain(purchases.iter().map(|purchase| ("a price", purchase.price)));
        if let Some((what, amount)) = amounts.find(|(_, amount)| !(*amount >= 0.0 && amount.is_finite())) {
            return Err(DecisionError::Amount { what, amount });
        }
        let trials = nothing.times_s.len();
        let uneven = purchases.iter().map(|purchase| purchase.times_s.len()).find(|count| *count != trials);
        if let Some(count) = uneven.or((trials < TRIALS_MIN).then_some(trials)) {
            return Err(DecisionError::Trials(count));
        }
        let mut times = purchases.iter().flat_map(|purchase| &purchase.times_s);
        if let Some(&time_s) = times.find(|time_s| !(**time_s > 0.0 && time_s.is_finite())) {
            return Err(DecisionError::Time(time_s));
        }
        let gain = |purchase: &TimedPurchase| GainInterval::of(&purchase.times_s, &nothing.times_s);
        let prices = purchases.iter().map(|purchase| purchase.price).collect();
        Ok(Market { purchases, prices, gains: purchases.iter().map(gain).collect() })
    }

    fn judged(&self, index: usize, criteria: &Criteria) -> JudgedPurchase {
        JudgedPurchase {
            gain: self.gains[index],
            price_per_percent: (self.gains[index].median > 0.0).then(|| self.price_per_percent(index)),
            is_on_front: self.is_on_front(index),
            verdict: self.verdict(index, criteria),
        }
    }

    fn percents(&self, index: usize) -> f64 {
        self.gains[index].median * 100.0
    }

    fn price_per_percent(&self, index: usize) -> f64 {
        self.prices[index] / self.percents(index)
    }

    fn is_on_front(&self, index: usize) -> bool {
        let (price, gain) = (self.prices[index], self.gains[index].median);
        !(0..self.prices.len()).any(|other| {
            let (other_price, other_gain) = (self.prices[other], self.gains[other].median);
            // Of equals, the first is on the front.
            let is_better = other_price < price || other_gain > gain || other < index;
            other != index && other_price <= price && other_gain >= gain && is_better
        })
    }

    fn verdict(&self, index: usize, criteria: &Criteria) -> PurchaseVerdict {
        let (gain, price) = (&self.gains[index], self.prices[index]);
        match () {
            () if index == 0 => PurchaseVerdict::Nothing,
            () if gain.median < criteria.least_gain || gain.median <= 0.0 => PurchaseVerdict::TooLittle,
            () if !gain.is_certain() => PurchaseVerdict::WithinNoise,
            () if criteria.budget.is_some_and(|budget| price > budget) => PurchaseVerdict::OverBudget,
            () if criteria.percent_worth.is_some_and(|worth| self.percents(index) * worth < price) => {
                PurchaseVerdict::TooDear
            }
            () => PurchaseVerdict::WorthIt,
        }
    }

    /// Tells whether the trials show that one purchase gains more than another.
    fn is_told_from(&self, index: usize, other: usize) -> bool {
        GainInterval::of(&self.purchases[index].times_s, &self.purchases[other].times_s).is_certain()
    }

    /// Returns the price of each additional percent of a dearer purchase, if it certainly gains more
    /// than the other, and at least `least_gain` more.
    fn step_price(&self, index: usize, other: usize, least_gain: f64) -> Option<f64> {
        let more = self.gains[index].median - self.gains[other].median;
        let price = self.prices[index] - self.prices[other];
        let is_step = price > 0.0 && more > 0.0 && more >= least_gain && self.is_told_from(index, other);
        is_step.then(|| price / (more * 100.0))
    }

    /// Returns the purchase to make.
    fn choose(&self, criteria: &Criteria) -> usize {
        let is_worth_it = |index: &usize| self.verdict(*index, criteria) == PurchaseVerdict::WorthIt;
        let eligible: Vec<usize> = (1..self.prices.len()).filter(is_worth_it).collect();
        let by_gain = |a: usize, b: usize| self.gains[b].median.total_cmp(&self.gains[a].median);
        let best = match criteria.percent_worth {
            Some(worth) => {
                let cost = |index: usize| self.prices[index] - worth * self.percents(index);
                let by_cost = |a: &usize, b: &usize| cost(*a).total_cmp(&cost(*b)).then(by_gain(*a, *b));
                eligible.iter().copied().min_by(by_cost)
            }
            None => {
                // What is free is taken first: its price for each percent beats any other.
                let free = eligible.iter().copied().filter(|&index| self.prices[index] == 0.0);
                let free = free.min_by(|a, b| by_gain(*a, *b)).unwrap_or(0);
                let step = |&index: &usize| Some((self.step_price(index, free, criteria.least_gain)?, index));
                let steps = eligible.iter().filter_map(step);
                let paid = steps.min_by(|a, b| a.0.total_cmp(&b.0).then(by_gain(a.1, b.1)));
                paid.map(|(_, index)| index).or((free != 0).then_some(free))
            }
        };
        let Some(best) = best else { return 0 };
        let as_good = |other: &usize| self.prices[*other] < self.prices[best] && !self.is_told_from(best, *other);
        let by_price = |a: &usize, b: &usize| self.prices[*a].total_cmp(&self.prices[*b]).then(by_gain(*a, *b));
        eligible.iter().copied().filter(as_good).min_by(by_price).unwrap_or(best)
    }

    /// Returns the other answers where nothing is recommended.
    fn instead_of_nothing(&self, criteria: &Criteria) -> Vec<AnswerChange> {
        let mut changes = Vec::new();
        let mut add = |condition: &dyn Fn(usize) -> ChangeCondition, then: usize| {
            changes.extend((then != 0).then(|| AnswerChange { condition: condition(then), then }));
        };
        // The largest gain that anything else allows.
        let lenient = Criteria { least_gain: 0.0, ..*criteria };
        let allowed = (1..self.prices.len()).filter(|&it| self.verdict(it, &lenient) == PurchaseVerdict::WorthIt);
        let largest = allowed.max_by(|a, b| self.gains[*a].median.total_cmp(&self.gains[*b].median));
        if let Some(largest) = largest {
            let least_gain = self.gains[largest].median;
            let then = self.choose(&Criteria { least_gain, ..*criteria });
            add(&|_| ChangeCondition::LeastGainAtMost(least_gain), then);
        }
        let then = self.choose(&Criteria { budget: None, ..*criteria });
        add(&|then| ChangeCondition::BudgetAtLeast(self.prices[then]), then);
        if let Some(worth) = criteria.percent_worth {
            let then = self.choose(&Criteria { percent_worth: None, ..*criteria });
            add(&|then| ChangeCondition::PercentWorthAbove(self.price_per_percent(then)), then);
            add(&|then| ChangeCondition::PriceBelow(worth * self.percents(then)), then);
        }
        let noisy = (1..self.prices.len()).filter(|&it| self.verdict(it, criteria) == PurchaseVerdict::WithinNoise);
        let largest = noisy.max_by(|a, b| self.gains[*a].median.total_cmp(&self.gains[*b].median));
        add(&|_| ChangeCondition::MoreTrials, largest.unwrap_or(0));
        changes
    }

    /// Returns the other answers where this purchase is recommended.
    fn instead_of(&self, choice: usize, criteria: &Criteria) -> Vec<AnswerChange> {
        let mut changes = Vec::new();
        let mut add = |condition: ChangeCondition, then: usize| {
            changes.extend((then != choice).then_some(AnswerChange { condition, then }));
        };
        let mut from = choice;
        while let Some((worth, next)) = self.next_step(from, criteria) {
            add(ChangeCondition::PercentWorthAbove(worth), next);
            from = next;
        }
        let gain = self.gains[choice].median;
        let then = self.choose(&Criteria { least_gain: gain.next_up(), ..*criteria });
        add(ChangeCondition::LeastGainAbove(gain), then);
        let then = self.choose(&Criteria { budget: None, ..*criteria });
        add(ChangeCondition::BudgetAtLeast(self.prices[then]), then);
        let price = self.prices[choice];
        if price > 0.0 {
            let then = self.choose(&Criteria { budget: Some(price.next_down()), ..*criteria });
            add(ChangeCondition::BudgetBelow(price), then);
        }
        if let Some((price, then)) = self.price_limit(choice, criteria) {
            add(ChangeCondition::PriceAbove(price), then);
        }
        changes
    }

    /// Returns the purchase that gains more at the lowest price for each additional percent, with this
    /// price.
    fn next_step(&self, from: usize, criteria: &Criteria) -> Option<(f64, usize)> {
        let any_worth = Criteria { percent_worth: None, ..*criteria };
        let allowed = (1..self.prices.len()).filter(|&it| self.verdict(it, &any_worth) == PurchaseVerdict::WorthIt);
        let step = |index: usize| Some((self.step_price(index, from, 0.0)?, index));
        allowed.filter_map(step).min_by(|a, b| a.0.total_cmp(&b.0))
    }

    /// Returns the price above which the choice alone becomes so dear that the answer is another one,
    /// and that answer.
    fn price_limit(&self, choice: usize, criteria: &Criteria) -> Option<(f64, usize)> {
        let answer = |price: f64| {
            let mut prices = self.prices.clone();
            prices[choice] = price;
            Market { prices, gains: self.gains.clone(), ..*self }.choose(criteria)
        };
        let dearest = self.prices.iter().copied().chain(criteria.budget).fold(1.0, f64::max);
        let (mut low, mut high) = (self.prices[choice], 1000.0 * dearest);
        if answer(high) == choice {
            return None;
        }
        for _ in 0..HALVINGS {
            let middle = f64::midpoint(low, high);
            if answer(middle) == choice { low = middle } else { high = middle }
        }
        Some((low, answer(high)))
    }
}

#[cfg(test)]
mod tests {
    //! Guards against advice that costs money for nothing.
    use super::*;
    use PurchaseVerdict::{Nothing, OverBudget, TooDear, TooLittle, WithinNoise, WorthIt};

    const TRIALS: usize = 9;

    /// Purchase with this gain in each trial; seeds differ by far more than the purchases.
    fn gains(price: f64, gain: impl Fn(usize) -> f64) -> TimedPurchase {
        let times_s = (0..TRIALS).map(|trial| 100.0 * (trial + 1) as f64 / (1.0 + gain(trial))).collect();
        TimedPurchase { price, times_s }
    }

    fn sure(price: f64, gain: f64) -> TimedPurchase {
        gains(price, |trial| gain + 1e-4 * (trial as f64 - 4.0))
    }

    /// Purchase whose gain changes its sign with the seed.
    fn noisy(price: f64, gain: f64) -> TimedPurchase {
        gains(price, |trial| if trial.is_multiple_of(2) { gain } else { -gain })
    }

    fn market(purchases: &[TimedPurchase]) -> Vec<TimedPurchase> {
        let nothing = gains(0.0, |_| 0.0);
        [std::slice::from_ref(&nothing), purchases].concat()
    }

    const ANY: Criteria = Criteria { budget: None, least_gain: 0.01, percent_worth: None };

    fn decided(purchases: &[TimedPurchase], criteria: Criteria) -> Decision {
        decide(&market(purchases), &criteria).unwrap()
    }

    fn verdicts(decision: &Decision) -> Vec<PurchaseVerdict> {
        decision.purchases.iter().map(|purchase| purchase.verdict).collect()
    }

    fn front(decision: &Decision) -> Vec<bool> {
        decision.purchases.iter().map(|purchase| purchase.is_on_front).collect()
    }

    /// What `then` is under a condition of this kind.
    fn change(decision: &Decision, of: impl Fn(ChangeCondition) -> Option<f64>) -> Option<(f64, usize)> {
        decision.changes.iter().find_map(|change| Some((of(change.condition)?, change.then)))
    }

    #[test]
    fn the_lowest_price_for_a_percent_is_chosen() {
        let decision = decided(&[sure(100.0, 0.05), sure(150.0, 0.1), sure(400.0, 0.2)], ANY);
        assert_eq!(decision.choice, 2);
        assert_eq!(verdicts(&decision), [Nothing, WorthIt, WorthIt, WorthIt]);
        assert_eq!(front(&decision), [true; 4]);
        assert!((decision.purchases[2].price_per_percent.unwrap() - 15.0).abs() < 1e-9);
        assert_eq!(decision.purchases[0].price_per_percent, None);
    }

    #[test]
    fn a_dominated_purchase_is_neither_on_the_front_nor_chosen() {
        let decision = decided(&[sure(200.0, 0.1), sure(200.0, 0.08), sure(250.0, 0.1), sure(0.0, -0.02)], ANY);
        assert_eq!((decision.choice, front(&decision)), (1, vec![true, true, false, false, false]));
        // A loss is dominated even where it brings in nothing.
        assert_eq!(verdicts(&decision)[4], TooLittle);
    }

    #[test]
    fn of_equals_the_first_is_on_the_front_and_chosen() {
        let decision = decided(&[sure(200.0, 0.1), sure(200.0, 0.1)], ANY);
        assert_eq!((decision.choice, front(&decision)), (1, vec![true, true, false]));
        // As good as nothing is nothing.
        let decision = decided(&[gains(0.0, |_| 0.0)], Criteria { least_gain: 0.0, ..ANY });
        assert_eq!((decision.choice, front(&decision)), (0, vec![true, false]));
        // Equal prices for a percent: the larger gain.
        assert_eq!(decided(&[gains(100.0, |_| 0.25), gains(400.0, |_| 1.0)], ANY).choice, 2);
    }

    #[test]
    fn a_gain_for_nothing_is_taken() {
        let decision = decided(&[sure(0.0, 0.03), sure(100.0, 0.035)], ANY);
        assert_eq!(
            (decision.choice, front(&decision)),
            (1, vec![false, true, true]),
            "half a percent more is too little"
        );
        assert_eq!(decision.purchases[1].price_per_percent, Some(0.0));
        // What is paid for counts from there: 100 for 1 % more, or 300 for 6 % more.
        let purchases = [sure(0.0, 0.03), sure(100.0, 0.0401), sure(300.0, 0.09), sure(0.0, 0.02)];
        assert_eq!(decided(&purchases, ANY).choice, 3);
        // A loss that costs nothing is no beginning.
        assert_eq!(decided(&[sure(0.0, -0.03), sure(100.0, 0.02)], ANY).choice, 2);
    }

    #[test]
    fn less_than_the_least_gain_buys_nothing() {
        let least = Criteria { least_gain: 0.05, ..ANY };
        let decision = decided(&[sure(10.0, 0.03), sure(90.0, 0.04)], least);
        assert_eq!((decision.choice, verdicts(&decision)), (0, vec![Nothing, TooLittle, TooLittle]));
        let least_gain = |condition| match condition {
            ChangeCondition::LeastGainAtMost(gain) => Some(gain),
            _ => None,
        };
        let (gain, then) = change(&decision, least_gain).unwrap();
        assert!((gain - 0.04).abs() < 1e-9 && then == 2, "{decision:?}");
        let asked = decided(&[sure(10.0, 0.03), sure(90.0, 0.04)], Criteria { least_gain: gain, ..ANY });
        assert_eq!(asked.choice, then, "the change does what it says");
    }

    #[test]
    fn no_gain_at_all_buys_nothing_and_no_change_helps() {
        for gain in [0.0, -0.1] {
            let decision = decided(&[gains(10.0, |_| gain)], Criteria { least_gain: 0.0, ..ANY });
            assert_eq!((decision.choice, verdicts(&decision)), (0, vec![Nothing, TooLittle]));
            assert!(decision.changes.is_empty() && decision.purchases[1].price_per_percent.is_none());
        }
    }

    #[test]
    fn a_gain_within_the_noise_buys_nothing() {
        let decision = decided(&[noisy(10.0, 0.2)], ANY);
        assert_eq!((decision.choice, verdicts(&decision)), (0, vec![Nothing, WithinNoise]));
        assert!(decision.purchases[1].gain.median > 0.1, "by its median alone it would be bought");
        assert_eq!(decision.changes, [AnswerChange { condition: ChangeCondition::MoreTrials, then: 1 }]);
    }

    #[test]
    fn a_cheaper_purchase_that_the_trials_cannot_tell_from_the_best_is_preferred() {
        // The dearer one is better in five trials of nine.
        let alike = |trial: usize| if trial.is_multiple_of(2) { 0.09 } else { 0.21 };
        let cheaper = gains(99.0, alike);
        let decision = decided(&[sure(100.0, 0.1), cheaper.clone()], ANY);
        assert!(decision.purchases[1].gain.median > decision.purchases[2].gain.median);
        assert_eq!(decision.choice, 2);
        // It is not preferred if it is not worth it by itself.
        let decision = decided(&[sure(100.0, 0.1), cheaper], Criteria { least_gain: 0.095, ..ANY });
        assert_eq!(decision.choice, 1);
    }

    #[test]
    fn the_budget_is_kept_and_what_more_would_buy_is_said() {
        let purchases = [sure(100.0, 0.02), sure(150.0, 0.1)];
        let decision = decided(&purchases, Criteria { budget: Some(149.0), ..ANY });
        assert_eq!((decision.choice, verdicts(&decision)), (1, vec![Nothing, WorthIt, OverBudget]));
        let more = AnswerChange { condition: ChangeCondition::BudgetAtLeast(150.0), then: 2 };
        assert!(decision.changes.contains(&more), "{decision:?}");
        assert_eq!(decided(&purchases, Criteria { budget: Some(150.0), ..ANY }).choice, 2);
        let none = decided(&purchases, Criteria { budget: Some(99.0), ..ANY });
        assert_eq!((none.choice, verdicts(&none)), (0, vec![Nothing, OverBudget, OverBudget]));
        assert!(none.changes.contains(&more));
        let less = AnswerChange { condition: ChangeCondition::BudgetBelow(100.0), then: 0 };
        assert!(decision.changes.contains(&less), "{decision:?}");
        // Nothing to spend still takes what is free.
        assert_eq!(decided(&[sure(0.0, 0.1)], Criteria { budget: Some(0.0), ..ANY }).choice, 1);
    }

    #[test]
    fn the_worth_of_a_percent_decides_how_much_is_bought() {
        let purchases = [sure(100.0, 0.1), sure(200.0, 0.15), sure(400.0, 0.16)];
        let at = |worth| decided(&purchases, Criteria { percent_worth: Some(worth), ..ANY });
        assert_eq!(at(9.0).choice, 0);
        assert_eq!(verdicts(&at(9.0)), [Nothing, TooDear, TooDear, TooDear]);
        assert_eq!((at(11.0).choice, at(19.0).choice, at(21.0).choice, at(201.0).choice), (1, 1, 2, 3));
        let worth = |condition| match condition {
            ChangeCondition::PercentWorthAbove(worth) => Some(worth),
            _ => None,
        };
        let price = |condition| match condition {
            ChangeCondition::PriceBelow(price) => Some(price),
            _ => None,
        };
        let next = |decision: &Decision| change(decision, worth).map(|(worth, then)| (worth.round(), then));
        assert_eq!(
            (next(&at(9.0)), next(&at(11.0)), next(&at(21.0))),
            (Some((10.0, 1)), Some((20.0, 2)), Some((200.0, 3)))
        );
        assert_eq!(change(&at(9.0), price).map(|(price, then)| (price.round(), then)), Some((90.0, 1)));
        // Without a worth, the next step is said all the same.
        assert_eq!(next(&decided(&purchases, ANY)), Some((20.0, 2)));
        assert_eq!(next(&at(201.0)), None);
        let steps = decided(&purchases, ANY).changes.iter().filter_map(|change| worth(change.condition)).count();
        assert_eq!(steps, 2, "each step is said");
    }

    #[test]
    fn the_price_at_which_another_is_better_is_exact() {
        let mut purchases = vec![sure(100.0, 0.1), sure(200.0, 0.15)];
        let price = |condition| match condition {
            ChangeCondition::PriceAbove(price) => Some(price),
            _ => None,
        };
        let decision = decided(&purchases, ANY);
        let (limit, then) = change(&decision, price).unwrap();
        assert!((limit - 133.33).abs() < 0.01 && then == 2, "{decision:?}");
        purchases[0].price = limit * 1.001;
        assert_eq!(decided(&purchases, ANY).choice, then);
        purchases[0].price = limit * 0.999;
        assert_eq!(decided(&purchases, ANY).choice, 1);
        // The only one that is worth it is bought at any price, unless there is a budget.
        assert_eq!(change(&decided(&purchases[..1], ANY), price), None);
        let limited = decided(&purchases[..1], Criteria { budget: Some(500.0), ..ANY });
        assert_eq!(change(&limited, price).map(|(price, then)| (price.round(), then)), Some((500.0, 0)));
    }

    #[test]
    fn changes_lead_where_they_say() {
        let mut random = fastrand::Rng::with_seed(11);
        let mut seen = 0;
        for _ in 0..3000 {
            let count = random.usize(1..7);
            let mut draw = || match random.u8(..3) {
                0 => noisy(f64::from(random.u8(..20)) * 10.0, random.f64() * 0.2),
                _ => sure(f64::from(random.u8(..20)) * 10.0, random.f64() * 0.3 - 0.05),
            };
            let purchases: Vec<TimedPurchase> = (0..count).map(|_| draw()).collect();
            let criteria = Criteria {
                budget: random.bool().then(|| f64::from(random.u8(..20)) * 10.0),
                least_gain: random.f64() * 0.1,
                percent_worth: random.bool().then(|| random.f64() * 20.0),
            };
            let decision = decided(&purchases, criteria);
            let chosen = &decision.purchases[decision.choice];
            if decision.choice > 0 {
                assert!(chosen.verdict == WorthIt && chosen.gain.is_certain(), "{decision:?}");
                let price = purchases[decision.choice - 1].price;
                assert!(criteria.budget.is_none_or(|budget| price <= budget));
            } else {
                assert!(decision.purchases.iter().all(|purchase| purchase.verdict != WorthIt));
            }
            for change in &decision.changes {
                assert_ne!(change.then, decision.choice);
                let mut changed = purchases.clone();
                let criteria = match change.condition {
                    ChangeCondition::LeastGainAbove(gain) => Criteria { least_gain: gain.next_up(), ..criteria },
                    ChangeCondition::LeastGainAtMost(gain) => Criteria { least_gain: gain, ..criteria },
                    ChangeCondition::BudgetAtLeast(budget) => Criteria { budget: Some(budget), ..criteria },
                    ChangeCondition::BudgetBelow(budget) => Criteria { budget: Some(budget.next_down()), ..criteria },
                    ChangeCondition::PriceAbove(price) => {
                        changed[decision.choice - 1].price = price * (1.0 + 1e-9) + 1e-9;
                        criteria
                    }
                    // These two name the first step; a better one may lie beyond. More trials cannot be made up.
                    ChangeCondition::PercentWorthAbove(_)
                    | ChangeCondition::PriceBelow(_)
                    | ChangeCondition::MoreTrials => continue,
                };
                let after = decided(&changed, criteria);
                if matches!(change.condition, ChangeCondition::BudgetAtLeast(_)) {
                    // A cheaper one may be as good while the dearer is out of reach.
                    assert_ne!(after.choice, 0, "{change:?} of {decision:?}");
                } else {
                    assert_eq!(after.choice, change.then, "{change:?} of {decision:?}");
                }
                seen += 1;
            }
        }
        assert!(seen > 3000, "{seen}");
    }

    #[test]
    fn numbers_that_are_none_are_refused() {
        let refused = |purchases: &[TimedPurchase], criteria: Criteria| decide(purchases, &criteria).unwrap_err();
        for bad in [f64::NAN, f64::INFINITY, -1.0] {
            let amount = |error| matches!(error, DecisionError::Amount { .. });
            assert!(amount(refused(&market(&[sure(bad, 0.1)]), ANY)), "price {bad}");
            assert!(amount(refused(&market(&[]), Criteria { budget: Some(bad), ..ANY })));
            assert!(amount(refused(&market(&[]), Criteria { least_gain: bad, ..ANY })));
            assert!(amount(refused(&market(&[]), Criteria { percent_worth: Some(bad), ..ANY })));
            let mut wrong = sure(1.0, 0.1);
            wrong.times_s[3] = bad;
            assert!(matches!(refused(&market(&[wrong]), ANY), DecisionError::Time(_)), "time {bad}");
        }
        let mut wrong = sure(1.0, 0.1);
        wrong.times_s[3] = 0.0;
        assert_eq!(refused(&market(&[wrong.clone()]), ANY), DecisionError::Time(0.0));
        wrong.times_s.pop();
        assert_eq!(refused(&market(&[wrong]), ANY), DecisionError::Trials(TRIALS - 1));
        let few = [TimedPurchase { price: 0.0, times_s: vec![1.0; TRIALS_MIN - 1] }];
        assert_eq!(refused(&few, ANY), DecisionError::Trials(TRIALS_MIN - 1));
        assert_eq!(refused(&[], ANY), DecisionError::NothingToCompare);
        assert_eq!(refused(&[sure(1.0, 0.0)], ANY), DecisionError::NothingToCompare);
        assert_eq!(decide(&market(&[]), &ANY).unwrap().choice, 0, "nothing is on offer");
    }
}
