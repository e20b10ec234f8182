//! Checks for memory expanders: memory that the processor loads from, farther away than its own.

use super::CheckResult;
use std::path::Path;

/// Finds NUMA nodes without processors, and DAX devices, as which CXL expanders appear.
pub(super) fn expanders() -> CheckResult {
    let devices = names(Path::new("/sys/bus/dax/devices"));
    look(Path::new("/sys/devices/system/node"), &devices)
}

fn look(nodes: &Path, devices: &[String]) -> CheckResult {
    let name = "memory expanders";
    let Ok(with_memory) = std::fs::read_to_string(nodes.join("has_memory")) else {
        return CheckResult::ok(name, "this kernel knows no NUMA nodes; numa: cannot be used");
    };
    let is_alone = |node: &u32| {
        let list = std::fs::read_to_string(nodes.join(format!("node{node}/cpulist")));
        list.is_ok_and(|list| list.trim().is_empty())
    };
    let with_memory = numbers(with_memory.trim());
    let alone: Vec<String> =
        with_memory.iter().filter(|node| is_alone(node)).map(|node| format!("numa:{node}")).collect();
    let dax = devices.iter().map(|device| format!("dax:/dev/{device}?device=erase"));
    let found: Vec<String> = alone.into_iter().chain(dax).collect();
    if found.is_empty() {
        let nodes: Vec<String> = with_memory.iter().map(|node| format!("numa:{node}")).collect();
        let nodes = nodes.join(", ");
        return CheckResult::ok(
            name,
            format!("none: no node of memory only and no DAX device; {nodes} can stand in for one"),
        );
    }
    CheckResult::ok(name, found.join(", "))
}

/// Parses the numbers in a list as the kernel writes it: `0-1,4`.
fn numbers(list: &str) -> Vec<u32> {
    let ranges = list.split(',').filter_map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(first.parse().ok()?..=last.parse().ok()?)
    });
    ranges.flatten().collect()
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    //! Danger: an expander that is there and not seen.
    use super::*;

    #[test]
    fn lists_of_the_kernel_are_understood() {
        assert_eq!(numbers("0"), [0]);
        assert_eq!(numbers("0-2,5,7-8"), [0, 1, 2, 5, 7, 8]);
        assert_eq!(numbers(""), [0; 0]);
    }

    #[test]
    fn nodes_without_processors_and_devices_are_named() {
        let folder = std::env::temp_dir().join(format!("farfield-nodes-{}", std::process::id()));
        for (node, list) in [(0, "0-1\n"), (1, "\n")] {
            std::fs::create_dir_all(folder.join(format!("node{node}"))).unwrap();
            std::fs::write(folder.join(format!("node{node}/cpulist")), list).unwrap();
        }
        std::fs::write(folder.join("has_memory"), "0\n").unwrap();
        assert!(look(&folder, &[]).found.contains("numa:0 can stand in"));
        assert_eq!(look(&folder, &["dax0.0".into()]).found, "dax:/dev/dax0.0?device=erase");
        std::fs::write(folder.join("has_memory"), "0-1\n").unwrap();
        assert_eq!(look(&folder, &[]).found, "numa:1");
        std::fs::remove_dir_all(&folder).unwrap();
        assert!(look(&folder, &[]).found.contains("no NUMA"));
    }
}
