//! When jobs arrive.

use super::SplitMix64;

/// Arrivals of the jobs of a scenario.
#[derive(Clone, Debug, PartialEq)]
pub enum Arrivals {
    /// All within so many seconds, at random.
    Window(f64),
    /// A Poisson process with so many jobs in a second.
    Poisson(f64),
    /// As recorded: class and second of each job.
    Recorded(Vec<Arrival>),
}

/// Arrival of a job.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Arrival {
    /// Index of its class.
    pub class: usize,
    /// Time in seconds.
    pub at_s: f64,
}

/// Reason why arrivals are none.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ArrivalError {
    /// A row of recorded arrivals is wrong.
    #[error("line {line}: {message}")]
    Row {
        /// Number of the line, from 1.
        line: usize,
        /// What is wrong.
        message: String,
    },
    /// Without jobs there is nothing to simulate.
    #[error("there are no jobs; give each class a count, or record at least one arrival")]
    NoJobs,
    /// More than can be simulated in reasonable time.
    #[error("{0} jobs are more than the {JOBS_MAX} that a simulation takes")]
    TooMany(usize),
    /// A rate or a window that is not a number above 0.
    #[error("the arrivals' window, rate or time must be a number of seconds, at least 0; {0} is not")]
    Time(f64),
}

const JOBS_MAX: usize = 10_000_000;

impl Arrivals {
    /// Draws the arrivals of one run, sorted by time.
    pub(super) fn draw(
        &self,
        counts: &[usize],
        random: &mut SplitMix64,
        into: &mut Vec<Arrival>,
    ) -> Result<(), ArrivalError> {
        into.clear();
        let jobs = match self {
            Arrivals::Recorded(recorded) => recorded.len(),
            Arrivals::Window(_) | Arrivals::Poisson(_) => {
                counts.iter().fold(0usize, |sum, &count| sum.saturating_add(count))
            }
        };
        if jobs == 0 {
            return Err(ArrivalError::NoJobs);
        }
        if jobs > JOBS_MAX {
            return Err(ArrivalError::TooMany(jobs));
        }
        let all = counts.iter().enumerate().flat_map(|(class, &count)| std::iter::repeat_n(class, count));
        match self {
            Arrivals::Recorded(recorded) => into.extend(recorded),
            Arrivals::Window(seconds) => {
                into.extend(all.map(|class| Arrival { class, at_s: random.unit() * seconds }));
            }
            Arrivals::Poisson(per_s) => {
                into.extend(all.map(|class| Arrival { class, at_s: 0.0 }));
                // Classes mix evenly (Fisher and Yates).
                for last in (1..into.len()).rev() {
                    into.swap(last, random.below(last + 1));
                }
                let mut at_s = 0.0;
                for arrival in &mut *into {
                    at_s += random.exponential() / per_s;
                    arrival.at_s = at_s;
                }
            }
        }
        if let Some(wrong) = into.iter().find(|arrival| !(arrival.at_s >= 0.0 && arrival.at_s.is_finite())) {
            return Err(ArrivalError::Time(wrong.at_s));
        }
        // Stable: jobs that arrive at once keep their order.
        into.sort_by(|a, b| a.at_s.total_cmp(&b.at_s));
        Ok(())
    }
}

/// Reads recorded arrivals: CSV with a header that names the columns `workload` (or `class`) and
/// `arrival_ms` (or `arrival_s`). Other columns are ignored.
pub fn recorded(text: &str, names: &[&str]) -> Result<Vec<Arrival>, ArrivalError> {
    let mut lines = text.lines().enumerate();
    let header: Vec<&str> = lines.next().map_or(Vec::new(), |(_, line)| line.trim().split(',').collect());
    let column = |names: [&str; 2]| {
        let missing =
            || ArrivalError::Row { line: 1, message: format!("no column is called {} or {}", names[0], names[1]) };
        header.iter().position(|name| names.contains(name)).ok_or_else(missing)
    };
    let (class_column, time_column) = (column(["workload", "class"])?, column(["arrival_ms", "arrival_s"])?);
    let unit_s = if header[time_column] == "arrival_ms" { 1e-3 } else { 1.0 };
    let mut arrivals = Vec::new();
    for (index, line) in lines.filter(|(_, line)| !line.trim().is_empty()) {
        let wrong = |message| ArrivalError::Row { line: index + 1, message };
        let cells: Vec<&str> = line.trim().split(',').collect();
        if cells.len() != header.len() {
            return Err(wrong(format!("{} cells instead of {}; was the file cut short?", cells.len(), header.len())));
        }
        let name = cells[class_column];
        let class = names.iter().position(|known| *known == name);
        let class =
            class.ok_or_else(|| wrong(format!("no class is called {name:?}; known are {}", names.join(", "))))?;
        let time: f64 =
            cells[time_column].parse().map_err(|_| wrong(format!("{:?} is not a time", cells[time_column])))?;
        if !(time >= 0.0 && time.is_finite()) {
            return Err(wrong(format!("{time} is not a time: a number that is not negative")));
        }
        arrivals.push(Arrival { class, at_s: time * unit_s });
    }
    if arrivals.is_empty() { Err(ArrivalError::NoJobs) } else { Ok(arrivals) }
}

#[cfg(test)]
mod tests {
    //! Guards against arrivals that a bad file makes up.
    use super::*;

    #[test]
    fn recorded_arrivals_are_read_by_the_names_of_their_columns() {
        let text = "job_id,workload,arrival_ms\n0,b,1500\n\n1,a,250\n";
        let arrivals = recorded(text, &["a", "b"]).unwrap();
        assert_eq!(arrivals, [Arrival { class: 1, at_s: 1.5 }, Arrival { class: 0, at_s: 0.25 }]);
        assert_eq!(recorded("arrival_s,class\n2,a\n", &["a"]).unwrap()[0].at_s, 2.0);
    }

    #[test]
    fn bad_rows_are_named() {
        let check = |text: &str, complaint: &str| {
            let error = recorded(text, &["a"]).unwrap_err().to_string();
            assert!(error.contains(complaint), "{text:?}: {error}");
        };
        check("", "line 1: no column is called workload or class");
        check("class,time\na,1\n", "arrival_ms");
        check("class,arrival_s\na,1\na", "line 3: 1 cells instead of 2");
        check("class,arrival_s\nb,1\n", "\"b\"");
        check("class,arrival_s\na,NaN\n", "line 2: NaN");
        check("class,arrival_s\na,-1\n", "-1");
        check("class,arrival_s\na,x\n", "\"x\"");
        check("class,arrival_s\n", "no jobs");
    }

    #[test]
    fn drawn_arrivals_are_sorted_and_complete() {
        let mut arrivals = Vec::new();
        for kind in [Arrivals::Window(10.0), Arrivals::Poisson(2.0)] {
            kind.draw(&[300, 0, 200], &mut SplitMix64::new(5), &mut arrivals).unwrap();
            assert!(arrivals.is_sorted_by(|a, b| a.at_s <= b.at_s));
            let count = |class| arrivals.iter().filter(|arrival| arrival.class == class).count();
            assert_eq!([count(0), count(1), count(2)], [300, 0, 200]);
        }
        let end = arrivals[499].at_s;
        assert!((200.0..300.0).contains(&end), "500 jobs at 2 in a second, {end} s");
        assert_eq!(Arrivals::Window(1.0).draw(&[0], &mut SplitMix64::new(5), &mut arrivals), Err(ArrivalError::NoJobs));
        let many = Arrivals::Window(1.0).draw(&[usize::MAX, 2], &mut SplitMix64::new(5), &mut arrivals);
        assert_eq!(many, Err(ArrivalError::TooMany(usize::MAX)));
        let nan = Arrivals::Window(f64::NAN).draw(&[1], &mut SplitMix64::new(5), &mut arrivals);
        assert!(matches!(nan, Err(ArrivalError::Time(_))));
    }
}
