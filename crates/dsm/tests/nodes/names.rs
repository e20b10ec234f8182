//! Values that tasks of any node find by their names.
//!
//! Danger: a value that is read as one of another type, or after it was dropped; two values of one name; a value that
//! stays when its name was taken away; a wait for a name that nobody ends.

use crate::support::{Checked, NodesTest, all_is_free, at, until};
use crate::survival::kill_process;
use farfield_dsm::{DArc, DAtomic, DBox, DMutex, Far, Here, JoinError, NameError, NodeId, ShareError};
use std::time::{Duration, Instant};

pub(crate) const TESTS: &[NodesTest] = &[
    ("a_name_leads_to_its_value_at_each_node", 3, a_name_leads_to_its_value_at_each_node),
    ("a_name_is_refused_by_type_and_by_who_has_it", 2, a_name_is_refused_by_type_and_by_who_has_it),
    ("who_waits_for_a_name_is_told", 3, who_waits_for_a_name_is_told),
    ("random_names_lead_to_whole_values", 3, random_names_lead_to_whole_values),
    ("a_name_is_free_when_its_value_is_gone_with_its_node", 3, a_name_is_free_when_its_value_is_gone_with_its_node),
];
/// Nodes die in these, and have backups.
pub(crate) const SURVIVAL_TESTS: &[NodesTest] =
    &[("a_named_value_outlives_its_home", 3, a_named_value_outlives_its_home)];

const OTHER: NodeId = NodeId(1);
const WAIT: Duration = Duration::from_secs(60);

#[derive(Far)]
struct Table {
    rows: DMutex<u64>,
    title: DBox<[u8; 300]>,
}

impl Table {
    fn new(here: &Here<'_>, title: u8) -> Result<DArc<Table>, ShareError> {
        DArc::new(here, Table { rows: DMutex::new(here, 0)?, title: here.alloc([title; 300])? })
    }
}

/// Finds the table of a name, and counts a row. Returns the title and the rows before.
fn count(here: &Here<'_>, name: u64) -> Result<(u8, u64), ShareError> {
    let table = here.lookup::<Table>(&format!("table/{name}"))?;
    let table = table.get(here)?;
    let mut rows = table.rows.lock(here)?;
    *rows += 1;
    Ok((table.title.get(here)?[299], *rows - 1))
}

fn a_name_leads_to_its_value_at_each_node(here: &Here<'_>) -> Checked {
    for node in here.nodes() {
        at(here, node, u64::from(node.0), |here, name| {
            let table = Table::new(here, name as u8)?;
            Ok::<_, ShareError>(here.publish(&format!("table/{name}"), &table)?)
        })??;
    }
    for name in 0..3 {
        for (node, rows) in here.nodes().zip(0..) {
            assert_eq!(at(here, node, name, count)?, Ok((name as u8, rows)), "table/{name} at node {node}");
        }
    }
    for (node, name) in here.nodes().zip([1, 2, 0]) {
        let rows = at(here, node, name, |here, name| {
            let table = here.unpublish::<Table>(&format!("table/{name}"))?;
            Ok::<_, ShareError>(*table.get(here)?.rows.lock(here)?)
        })?;
        assert_eq!(rows, Ok(3));
        assert_eq!(at(here, node, name, count)?, Err(ShareError::NameRefused));
    }
    all_is_free(here)
}

fn a_name_is_refused_by_type_and_by_who_has_it(here: &Here<'_>) -> Checked {
    let name = || "n".to_owned();
    for node in here.nodes() {
        let published = at(here, node, (), |here, ()| {
            let number = DArc::new(here, 7u64)?;
            here.publish("n", &number)?;
            Ok::<_, ShareError>(number)
        })??;
        let absent = |name: &str| NameError::Absent { name: name.to_owned() };
        assert_eq!(here.lookup::<u64>("m").map(drop), Err(absent("m")));
        assert_eq!(here.unpublish::<u64>("m").map(drop), Err(absent("m")));
        assert_eq!(here.publish("n", &published), Err(NameError::Taken { name: name() }));
        assert_eq!(here.publish("n", &DArc::new(here, 1u8)?), Err(NameError::Taken { name: name() }));
        let other = NameError::OtherType { name: name(), found: "u64".into(), wanted: "i64" };
        assert_eq!(other.to_string(), "the value of the name n is a u64, not a i64");
        assert_eq!(here.lookup::<i64>("n").map(drop), Err(other.clone()));
        assert_eq!(here.lookup_within::<i64>("n", WAIT).map(drop), Err(other.clone()));
        assert_eq!(here.unpublish::<i64>("n").map(drop), Err(other));
        for bad in ["", "two words", "line\n"] {
            let refused = Err(NameError::NoName { name: bad.to_owned() });
            assert_eq!(here.publish(bad, &published), refused);
            assert_eq!(here.lookup::<u64>(bad).map(drop), refused);
        }
        drop(published);
        assert_eq!(*here.lookup::<u64>("n")?.get(here)?, 7);
        assert_eq!(*here.unpublish::<u64>("n")?.get(here)?, 7);
        assert_eq!(here.lookup::<u64>("n").map(drop), Err(absent("n")));
    }
    all_is_free(here)
}

fn who_waits_for_a_name_is_told(here: &Here<'_>) -> Checked {
    let begun = DArc::new(here, DAtomic::new(here, 0u64)?)?;
    let mut tasks = Vec::new();
    for node in here.nodes().chain(here.nodes()) {
        tasks.push(here.spawn_to(node, (begun.try_clone(here)?,), |here, (begun,)| {
            begun.get(here)?.fetch_add(here, 1)?;
            let found = here.lookup_within::<DAtomic<u64>>("later", WAIT)?;
            found.get(here)?.fetch_add(here, 1)
        })?);
    }
    until(|| begun.get(here).is_ok_and(|begun| begun.load(here) == Ok(6)));
    for node in here.nodes() {
        let (refused, waited) = at(here, node, (), |here, ()| {
            let started = Instant::now();
            let refused = here.lookup_within::<u64>("never", Duration::from_millis(20)).map(drop);
            (refused == Err(NameError::Absent { name: "never".into() }), started.elapsed())
        })?;
        assert!(refused && waited >= Duration::from_millis(20), "{waited:?}");
    }
    at(here, OTHER, (), |here, ()| {
        Ok::<_, ShareError>(here.publish("later", &DArc::new(here, DAtomic::new(here, 10u64)?)?)?)
    })??;
    let mut found = tasks.into_iter().map(|task| Ok(task.join(here)??)).collect::<Result<Vec<_>, JoinError>>()?;
    found.sort_unstable();
    assert_eq!(found, (10..16).collect::<Vec<_>>());
    assert_eq!(here.unpublish::<DAtomic<u64>>("later")?.get(here)?.load(here)?, 16);
    drop(begun);
    all_is_free(here)
}

/// Tasks give names, look them up and take them away, all at the same time.
fn random_names_lead_to_whole_values(here: &Here<'_>) -> Checked {
    let mut tasks = Vec::new();
    for (node, seed) in here.nodes().zip(0u64..) {
        tasks.push(here.spawn_to(node, (seed,), |here, (seed,)| {
            let mut random = crate::support::seeded(seed);
            random = fastrand::Rng::with_seed(random.u64(..) ^ seed);
            let mut found = 0u64;
            for step in 0..400u64 {
                let name = format!("name{}", random.u8(..2));
                match random.u8(..4) {
                    0 => {
                        let value = [here.id().0.into(), step, !step];
                        match here.publish(&name, &DArc::new(here, (here.alloc(value)?, value))?) {
                            Ok(()) | Err(NameError::Taken { .. }) => {}
                            Err(error) => return Err(error.into()),
                        }
                    }
                    1 => match here.unpublish::<(DBox<[u64; 3]>, [u64; 3])>(&name) {
                        Ok(_) | Err(NameError::Absent { .. }) => {}
                        Err(error) => return Err(error.into()),
                    },
                    _ => match here.lookup::<(DBox<[u64; 3]>, [u64; 3])>(&name) {
                        Ok(value) => {
                            let (owned, plain) = value.get(here)?;
                            assert_eq!((owned.get(here)?, !plain[1]), (plain, plain[2]));
                            found += 1;
                        }
                        Err(NameError::Absent { .. }) => {}
                        Err(error) => return Err(error.into()),
                    },
                }
            }
            Ok::<_, ShareError>(found)
        })?);
    }
    let mut found = 0;
    for task in tasks {
        found += task.join(here)??;
    }
    assert!(found > 50, "{found}");
    for name in ["name0", "name1"] {
        drop(here.unpublish::<(DBox<[u64; 3]>, [u64; 3])>(name));
    }
    all_is_free(here)
}

/// Kills node 1, and waits until the first node and the last one know it.
fn kill_other(here: &Here<'_>) -> Checked {
    kill_process(at(here, OTHER, (), |_, ()| std::process::id())?);
    let lost = ShareError::NodeLost { node: OTHER };
    until(|| here.spawn_to(OTHER, (), |_, ()| ()).map(drop) == Err(lost));
    until(|| {
        at(here, NodeId(2), (), |here, ()| here.spawn_to(OTHER, (), |_, ()| ()).map(drop)).expect("it lives")
            == Err(lost)
    });
    Ok(())
}

fn a_name_is_free_when_its_value_is_gone_with_its_node(here: &Here<'_>) -> Checked {
    // One value is at the node that dies; of the other one only the name is from there.
    let kept = Table::new(here, 2)?;
    at(here, OTHER, (kept,), |here, (kept,)| {
        here.publish("table/1", &Table::new(here, 1)?)?;
        Ok::<_, ShareError>(here.publish("table/2", &kept)?)
    })??;
    // It dies while it waits for a name.
    drop(here.spawn_to(OTHER, (), |here, ()| here.lookup_within::<u64>("later", WAIT).map(drop).is_ok())?);
    kill_other(here)?;
    let lost = ShareError::NodeLost { node: OTHER };
    for node in [NodeId(0), NodeId(2)] {
        assert_eq!(at(here, node, 1, count)?, Err(lost));
    }
    assert_eq!(at(here, NodeId(2), 2, count)?, Ok((2, 0)));
    at(here, NodeId(2), (), |here, ()| Ok::<_, ShareError>(here.publish("table/1", &Table::new(here, 3)?)?))??;
    assert_eq!(at(here, NodeId(0), 1, count)?, Ok((3, 0)));
    assert!(matches!(here.publish("table/1", &Table::new(here, 4)?), Err(NameError::Taken { .. })));
    here.publish("later", &DArc::new(here, 1u64)?)?;
    assert_eq!(*here.lookup::<u64>("later")?.get(here)?, 1);
    Ok(())
}

fn a_named_value_outlives_its_home(here: &Here<'_>) -> Checked {
    let wait = at(here, OTHER, (), |here, ()| {
        here.publish("table/1", &Table::new(here, 1)?)?;
        Ok::<_, ShareError>(here.publish("table/4", &Table::new(here, 4)?)?)
    })?;
    wait?;
    for (node, rows) in here.nodes().zip(0..) {
        assert_eq!(at(here, node, 1, count)?, Ok((1, rows)));
    }
    kill_other(here)?;
    for (node, rows) in [(0, 3), (2, 4), (0, 5)] {
        assert_eq!(at(here, NodeId(node), 1, count)?, Ok((1, rows)), "at node {node}");
    }
    // Its name is not free, and it can be taken away.
    assert!(matches!(here.publish("table/1", &Table::new(here, 2)?), Err(NameError::Taken { .. })));
    let rows = at(here, NodeId(2), (), |here, ()| {
        Ok::<_, ShareError>(*here.unpublish::<Table>("table/1")?.get(here)?.rows.lock(here)?)
    })?;
    assert_eq!(rows, Ok(6));
    assert_eq!(at(here, NodeId(2), 4, count)?, Ok((4, 0)), "nobody has looked it up before");
    assert!(matches!(here.lookup::<Table>("table/1"), Err(NameError::Absent { .. })));
    Ok(())
}
