//! What an operator installs in Slurm: a script of `job_submit/lua`, lines of `slurm.conf`, and the
//! reservation that keeps the gate's licence from everybody.

use super::{GATE_LICENSE, POOL_LICENSE, RESERVATION};

/// Name of the script, beside `slurm.conf`.
pub const SCRIPT: &str = "farfield.lua";
/// Name of the script that Slurm calls, which calls ours.
pub const JOB_SUBMIT: &str = "job_submit.lua";
/// Exit code of a job whose memory server was lost, on which Slurm starts it again.
pub const REQUEUE_EXIT: u8 = 93;
/// Exit code of a job that was not started, because its node has no agent or its options are wrong.
/// Slurm queues it again and holds it until an operator has looked and releases it.
pub const HOLD_EXIT: u8 = 97;
/// Comments around our lines of `slurm.conf`.
const BEGIN: &str = "# BEGIN of lines by `farfield cluster init`, which overwrites changes.";
const END: &str = "# END of lines by `farfield cluster init`.";
/// First line of a `job_submit.lua` that is ours.
const OURS: &str = "-- Written by `farfield cluster init`.";

/// Decisions of an operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterSetup {
    /// Partition of jobs with far memory.
    pub partition: String,
    /// Nodes of the partition, as Slurm writes them; `None` if the partition exists.
    pub nodes: Option<String>,
    /// Size of the pool in MiB.
    pub pool_mib: u64,
    /// User id of Slurm's daemons.
    pub slurm_uid: u32,
}

/// Reason why Slurm cannot be set up.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SetupError {
    /// A name that Slurm, or a line of its configuration, would read otherwise.
    #[error("{what} {name:?} has other characters than letters, digits and _-.,[]")]
    Name {
        /// Name of the option.
        what: &'static str,
        /// Value of the option.
        name: String,
    },
    /// More than Slurm can count.
    #[error("a pool has at least 1 MiB and at most 4 PiB")]
    Pool,
    /// `slurm.conf` has lines with the same names.
    #[error("slurm.conf has lines for this already. Change them to these, then run this again:\n{}", .0.join("\n"))]
    Conflict(Vec<String>),
}

impl ClusterSetup {
    /// Checks names, which become lines of a configuration and of a script.
    pub fn check(&self) -> Result<(), SetupError> {
        let is_word = |text: &str, others: &str| {
            !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || others.contains(c))
        };
        for (what, name, others) in
            [("--partition", Some(&self.partition), "_-."), ("--nodes", self.nodes.as_ref(), "_-.,[]")]
        {
            if let Some(name) = name.filter(|name| !is_word(name, others)) {
                return Err(SetupError::Name { what, name: name.clone() });
            }
        }
        // Slurm counts licences in 32 bits.
        if self.pool_mib == 0 || self.pool_mib >= u64::from(u32::MAX - 16) { Err(SetupError::Pool) } else { Ok(()) }
    }

    /// Returns the script.
    pub fn script(&self) -> String {
        include_str!("farfield.lua")
            .replace("@PARTITION@", &self.partition)
            .replace("@UID@", &self.slurm_uid.to_string())
            .replace("@GATE_LICENSE@", GATE_LICENSE)
            .replace("@POOL_LICENSE@", POOL_LICENSE)
    }

    /// Returns `slurm.conf` with our lines at its end, beside those that the site has already.
    pub fn conf(&self, slurm_conf: &str) -> Result<String, SetupError> {
        let sites = without_block(slurm_conf);
        let mut conflicts = Vec::new();
        let mut lines = vec![BEGIN.to_owned()];
        let wanted = [
            ("Licenses", vec![format!("{POOL_LICENSE}:{}", self.pool_mib), format!("{GATE_LICENSE}:1")]),
            ("JobSubmitPlugins", vec!["lua".to_owned()]),
            ("RequeueExit", vec![REQUEUE_EXIT.to_string()]),
            ("RequeueExitHold", vec![HOLD_EXIT.to_string()]),
        ];
        for (name, values) in wanted {
            let Some(line) = value_of(&sites, name) else {
                lines.push(format!("{name}={}", values.join(",")));
                continue;
            };
            let has: Vec<&str> = line.split(',').map(str::trim).collect();
            let is_there = |value: &String| has.contains(&value.as_str()) || has_exit_code(line, value);
            if values.iter().all(is_there) {
                continue;
            }
            let key = |value: &str| value.split(':').next().map(str::to_owned);
            let others = has.into_iter().filter(|this| !values.iter().any(|value| key(value) == key(this)));
            let all: Vec<String> = others.map(str::to_owned).chain(values.iter().cloned()).collect();
            conflicts.push(format!("{name}={}", all.join(",")));
        }
        if let Some(nodes) = &self.nodes {
            lines.push(format!("PartitionName={} Nodes={nodes} State=UP", self.partition));
        }
        lines.push(END.to_owned());
        if conflicts.is_empty() { Ok(sites + &lines.join("\n") + "\n") } else { Err(SetupError::Conflict(conflicts)) }
    }

    /// Returns the arguments of `scontrol` that create the reservation.
    pub fn reservation(slurm_user: &str) -> Vec<String> {
        let words = ["create", "reservation", "starttime=now", "duration=infinite", "flags=LICENSE_ONLY"];
        let own = [
            format!("reservationname={RESERVATION}"),
            format!("users={slurm_user}"),
            format!("licenses={GATE_LICENSE}:1"),
        ];
        words.map(str::to_owned).into_iter().chain(own).collect()
    }
}

/// Returns `slurm.conf` without our lines, ended by a line break.
fn without_block(slurm_conf: &str) -> String {
    let mut is_ours = false;
    let mut text = String::new();
    for line in slurm_conf.lines() {
        is_ours |= line == BEGIN;
        if !is_ours {
            text += line;
            text.push('\n');
        }
        is_ours &= line != END;
    }
    text
}

/// Returns the `job_submit.lua` that calls our script, or `None` if the site's own calls it. The
/// error has the lines that the site's own lacks.
pub fn job_submit(existing: Option<&str>, script: &str) -> Result<Option<String>, String> {
    let load = format!("dofile({script:?})");
    match existing {
        Some(text) if !text.starts_with(OURS) => {
            let calls = ["farfield_job_submit", "farfield_job_modify", SCRIPT];
            if calls.iter().all(|call| text.contains(call)) {
                return Ok(None);
            }
            Err(format!(
                "{load}\n-- at the beginning of slurm_job_submit:\nlocal answer = farfield_job_submit(job_desc)\n\
                 if answer ~= slurm.SUCCESS then return answer end\n-- at the beginning of slurm_job_modify:\n\
                 local answer = farfield_job_modify(job_desc, job_rec, modify_uid)\n\
                 if answer ~= slurm.SUCCESS then return answer end"
            ))
        }
        _ => Ok(Some(format!(
            "{OURS}\n{load}\n\n\
             function slurm_job_submit(job, partitions, uid)\n  return farfield_job_submit(job)\nend\n\n\
             function slurm_job_modify(job, record, partitions, uid)\n  return farfield_job_modify(job, record, uid)\n\
             end\n\nreturn slurm.SUCCESS\n"
        ))),
    }
}

/// Tells whether a list of exit codes, with ranges like `10-12`, has this one.
pub(super) fn has_exit_code(list: &str, code: &str) -> bool {
    let Ok(code) = code.parse::<u8>() else { return false };
    list.split(',').any(|item| {
        let (first, last) = item.split_once('-').unwrap_or((item, item));
        let bounds = (first.trim().parse::<u8>(), last.trim().parse::<u8>());
        matches!(bounds, (Ok(first), Ok(last)) if (first..=last).contains(&code))
    })
}

/// Returns the value of a line of `slurm.conf`, whose names are written in any case.
fn value_of<'a>(slurm_conf: &'a str, name: &str) -> Option<&'a str> {
    slurm_conf.lines().find_map(|line| {
        let line = line.split('#').next().unwrap_or_default();
        let (key, value) = line.split_once('=')?;
        key.trim().eq_ignore_ascii_case(name).then(|| value.trim())
    })
}

#[cfg(test)]
mod tests {
    //! Guards against a configuration that is spoiled, or changed twice.
    use super::*;

    fn setup() -> ClusterSetup {
        ClusterSetup { partition: "far".into(), nodes: Some("n[1-3]".into()), pool_mib: 4096, slurm_uid: 64030 }
    }

    #[test]
    fn lines_are_added_once_and_never_beside_lines_of_the_same_name() {
        let conf = setup().conf("ClusterName=x\n#Licenses=a:1").unwrap();
        let expected = format!(
            "ClusterName=x\n#Licenses=a:1\n{BEGIN}\nLicenses=farmem:4096,farfield_gate:1\nJobSubmitPlugins=lua\n\
             RequeueExit=93\nRequeueExitHold=97\nPartitionName=far Nodes=n[1-3] State=UP\n{END}\n"
        );
        assert_eq!(conf, expected);
        assert_eq!(setup().conf(&conf).unwrap(), conf);
        let larger = ClusterSetup { pool_mib: 8192, nodes: None, ..setup() };
        let grown = larger.conf(&(conf + "Last=1\n")).unwrap();
        assert!(grown.starts_with("ClusterName=x\n#Licenses=a:1\nLast=1\n# BEGIN") && grown.contains("farmem:8192"));
        assert!(!grown.contains("farmem:4096") && !grown.contains("PartitionName"), "{grown}");
        let conf = "licenses = matlab:2,farmem:1\nJobSubmitPlugins=lua\nRequeueExit=7\nRequeueExitHold=90-95,99";
        let SetupError::Conflict(lines) = setup().conf(conf).unwrap_err() else { panic!() };
        let expected =
            ["Licenses=matlab:2,farmem:4096,farfield_gate:1", "RequeueExit=7,93", "RequeueExitHold=90-95,99,97"];
        assert_eq!(lines, expected);
        let ranges = setup().conf("RequeueExit=90-95\nRequeueExitHold=7,96-98").unwrap();
        assert_eq!(ranges.matches("RequeueExit").count(), 2, "both codes are there: {ranges}");
        let mended = setup().conf(&lines.join("\n")).unwrap();
        assert!(mended.contains("# BEGIN") && mended.contains("JobSubmitPlugins=lua\nPartitionName"), "{mended}");
    }

    #[test]
    fn exit_codes_are_found_in_lists_and_ranges() {
        let has = |list, code| has_exit_code(list, code);
        assert!(has("97", "97") && has("1, 97", "97") && has("96-98", "97") && has("97-97", "97"));
        for list in ["", "9", "197", "98-96", "96-", "-97", "a-b", "97-300"] {
            assert!(!has(list, "97"), "{list}");
        }
        assert!(!has("lua", "lua"), "no number");
    }

    #[test]
    fn names_cannot_become_lines_or_code() {
        for partition in ["", "a b", "far\nLicenses=x", "\"", "far]]"] {
            let setup = ClusterSetup { partition: partition.into(), ..setup() };
            assert!(matches!(setup.check(), Err(SetupError::Name { what: "--partition", .. })), "{partition}");
        }
        assert!(ClusterSetup { nodes: Some("n1 State=DOWN".into()), ..setup() }.check().is_err());
        assert_eq!(ClusterSetup { pool_mib: 1 << 32, ..setup() }.check(), Err(SetupError::Pool));
        assert_eq!(setup().check(), Ok(()));
        let script = setup().script();
        assert!(!script.contains('@') && script.contains("local PARTITION = \"far\""), "{script}");
    }

    #[test]
    fn a_script_of_the_site_is_not_replaced() {
        let ours = job_submit(None, "/etc/slurm/farfield.lua").unwrap().unwrap();
        assert_eq!(job_submit(Some(&ours), "/etc/slurm/farfield.lua"), Ok(Some(ours)));
        let missing = job_submit(Some("function slurm_job_submit() end"), "/x/farfield.lua").unwrap_err();
        assert!(missing.contains("dofile(\"/x/farfield.lua\")"), "{missing}");
        assert_eq!(job_submit(Some(&format!("-- site\n{missing}")), "/x/farfield.lua"), Ok(None));
    }
}
