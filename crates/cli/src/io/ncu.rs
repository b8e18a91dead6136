//! NVIDIA Nsight Compute: where it is, what it is asked, and its CSV.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, Result};
use serde::Serialize;

const DRAM_READ: &str = "dram__bytes_read.sum";
const DRAM_WRITTEN: &str = "dram__bytes_write.sum";
/// What multiprocessors ask of L2; without this, what its parts ask of each other is counted too.
const L2_READ: &str = "lts__t_sectors_srcunit_tex_op_read.sum";
const L2_WRITTEN: &str = "lts__t_sectors_srcunit_tex_op_write.sum";
/// What came to the multiprocessors over the crossbar: L2's own count may hold more, or a sector twice.
const RECEIVED: &str = "l1tex__m_xbar2l1tex_read_bytes.sum";
/// Bytes of a sector, the unit in which L2 counts.
const SECTOR: f64 = 32.0;

const ARGUMENTS: [&str; 8] = [
    "--csv",
    "--print-units=base",
    "--target-processes=all",
    "--kernel-name=regex:^tw_(KERNELS)",
    "--cache-control=all",
    "--metrics",
    "dram__bytes_read.sum,dram__bytes_write.sum,lts__t_sectors_srcunit_tex_op_read.sum,lts__t_sectors_srcunit_tex_op_write.sum,l1tex__m_xbar2l1tex_read_bytes.sum",
    "--",
];

/// What `ncu` is given before the program, to count kernels whose name begins with one of these.
pub(super) fn arguments(kernels: &str) -> Vec<String> {
    ARGUMENTS
        .iter()
        .map(|argument| argument.replace("KERNELS", kernels))
        .collect()
}

/// Traffic of one kernel launch, in bytes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Kernel {
    pub(super) name: String,
    pub(super) dram_read: f64,
    pub(super) dram_written: f64,
    pub(super) l2_read: f64,
    pub(super) l2_written: f64,
    /// What the multiprocessors received of what they read.
    pub(super) received: f64,
}

/// The profiler, or why there is none.
pub(super) fn find() -> Result<PathBuf, String> {
    if let Some(named) = std::env::var_os("TILEWISE_NCU") {
        let path = PathBuf::from(named);
        return match path.is_file() {
            true => Ok(path),
            false => Err(format!("TILEWISE_NCU={}: no such file", path.display())),
        };
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut folders: Vec<PathBuf> = std::env::split_paths(&path).collect();
    for name in ["CUDA_HOME", "CUDA_PATH"] {
        folders.extend(std::env::var_os(name).map(|root| PathBuf::from(root).join("bin")));
    }
    folders.push("/usr/local/cuda/bin".into());
    if let Ok(versions) = std::fs::read_dir("/opt/nvidia/nsight-compute") {
        folders.extend(versions.flatten().map(|version| version.path()));
    }
    let name = if cfg!(windows) { "ncu.exe" } else { "ncu" };
    folders
        .into_iter()
        .map(|folder| folder.join(name))
        .find(|file| file.is_file())
        .ok_or_else(|| {
            "no ncu (NVIDIA Nsight Compute) on PATH, in CUDA_HOME or in /opt/nvidia; TILEWISE_NCU \
             names it"
                .into()
        })
}

/// What is behind an error of the profiler, where it is a known one.
pub(super) fn explain(said: &str) -> Option<&'static str> {
    [
        (
            "LibraryNotLoaded",
            "the driver's library for counters does not load here: a sandbox such as gVisor does not \
             let programs at it, and there is none in some containers",
        ),
        (
            "ERR_NVGPUCTRPERM",
            "the driver keeps the counters for administrators: run as root, in a container with \
             CAP_SYS_ADMIN, or have NVreg_RestrictProfilingToAdminUsers=0 set",
        ),
        (
            "No kernels were profiled",
            "no kernel of this program was launched under it",
        ),
        (
            "Failed to find metric",
            "this version of it does not know a counter that was asked for on this chip",
        ),
    ]
    .into_iter()
    .find_map(|(word, meaning)| said.contains(word).then_some(meaning))
}

/// The launches of a `--csv` report: a row for each launch and metric, after whatever the program and the
/// profiler said.
pub(super) fn parse(text: &str) -> Result<Vec<Kernel>> {
    let Some(start) = text.find("\"ID\",") else {
        return Ok(Vec::new());
    };
    let mut reader = csv::ReaderBuilder::new()
        .flexible(true)
        .from_reader(&text.as_bytes()[start..]);
    let header = reader.headers().context("ncu's CSV")?.clone();
    let column = |name: &str| {
        header
            .iter()
            .position(|known| known == name)
            .with_context(|| format!("ncu's CSV has no column {name:?}"))
    };
    let (id, kernel) = (column("ID")?, column("Kernel Name")?);
    let (metric, value) = (column("Metric Name")?, column("Metric Value")?);
    let mut launches: BTreeMap<u64, (String, BTreeMap<String, f64>)> = BTreeMap::new();
    for row in reader.records() {
        let row = row.context("ncu's CSV")?;
        // Lines of the program that follow are no rows.
        let Some(Ok(id)) = row.get(id).map(str::parse) else {
            continue;
        };
        let (Some(kernel), Some(metric), Some(value)) =
            (row.get(kernel), row.get(metric), row.get(value))
        else {
            continue;
        };
        let number = value
            .replace(',', "")
            .parse()
            .with_context(|| format!("ncu's CSV: {metric} of {kernel} is {value:?}"))?;
        let launch = launches
            .entry(id)
            .or_insert_with(|| (kernel.to_string(), BTreeMap::new()));
        launch.1.insert(metric.to_string(), number);
    }
    launches
        .into_values()
        .map(|(name, metrics)| {
            let of = |metric: &str| {
                metrics
                    .get(metric)
                    .copied()
                    .with_context(|| format!("ncu's CSV: {name} has no {metric}"))
            };
            Ok(Kernel {
                dram_read: of(DRAM_READ)?,
                dram_written: of(DRAM_WRITTEN)?,
                l2_read: of(L2_READ)? * SECTOR,
                l2_written: of(L2_WRITTEN)? * SECTOR,
                received: of(RECEIVED)?,
                name: name.split('(').next().unwrap_or_default().to_string(),
            })
        })
        .collect()
}

/// A report as ncu writes it, among what the profiled program says.
#[cfg(test)]
pub(super) const EXAMPLE: &str = r#"==PROF== Connected to process 4711
some output of the program
==PROF== Profiling "tw_fa2" - 0: 0%....50%....100% - 1 pass
==PROF== Disconnected from process 4711
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"
"0","4711","tilewise","127.0.0.1","tw_standard_scores(Args)","1","7","(256, 1, 1)","(64, 8, 1)","0","9.0","Command line profiler metrics","dram__bytes_read.sum","byte","4,202,496"
"0","4711","tilewise","127.0.0.1","tw_standard_scores(Args)","1","7","(256, 1, 1)","(64, 8, 1)","0","9.0","Command line profiler metrics","dram__bytes_write.sum","byte","33,554,432"
"0","4711","tilewise","127.0.0.1","tw_standard_scores(Args)","1","7","(256, 1, 1)","(64, 8, 1)","0","9.0","Command line profiler metrics","lts__t_sectors_srcunit_tex_op_read.sum","sector","262,144"
"0","4711","tilewise","127.0.0.1","tw_standard_scores(Args)","1","7","(256, 1, 1)","(64, 8, 1)","0","9.0","Command line profiler metrics","lts__t_sectors_srcunit_tex_op_write.sum","sector","1,048,576"
"0","4711","tilewise","127.0.0.1","tw_standard_scores(Args)","1","7","(256, 1, 1)","(64, 8, 1)","0","9.0","Command line profiler metrics","l1tex__m_xbar2l1tex_read_bytes.sum","byte","8,388,608"
"1","4711","tilewise","127.0.0.1","tw_fa2","1","7","(128, 1, 1)","(64, 1, 1)","0","9.0","Command line profiler metrics","dram__bytes_read.sum","byte","12"
"1","4711","tilewise","127.0.0.1","tw_fa2","1","7","(128, 1, 1)","(64, 1, 1)","0","9.0","Command line profiler metrics","dram__bytes_write.sum","byte","0"
"1","4711","tilewise","127.0.0.1","tw_fa2","1","7","(128, 1, 1)","(64, 1, 1)","0","9.0","Command line profiler metrics","lts__t_sectors_srcunit_tex_op_read.sum","sector","1.5"
"1","4711","tilewise","127.0.0.1","tw_fa2","1","7","(128, 1, 1)","(64, 1, 1)","0","9.0","Command line profiler metrics","lts__t_sectors_srcunit_tex_op_write.sum","sector","2"
"1","4711","tilewise","127.0.0.1","tw_fa2","1","7","(128, 1, 1)","(64, 1, 1)","0","9.0","Command line profiler metrics","l1tex__m_xbar2l1tex_read_bytes.sum","byte","48"
"#;

#[cfg(test)]
mod tests {
    use super::EXAMPLE as CSV;
    use super::*;

    #[test]
    fn launches_are_read_with_their_bytes() {
        let kernels = parse(CSV).unwrap();
        assert_eq!(kernels.len(), 2);
        assert_eq!(
            kernels[0],
            Kernel {
                name: "tw_standard_scores".into(),
                dram_read: 4_202_496.0,
                dram_written: 33_554_432.0,
                l2_read: 8_388_608.0,
                l2_written: 33_554_432.0,
                received: 8_388_608.0,
            }
        );
        assert_eq!((kernels[1].l2_read, kernels[1].l2_written), (48.0, 64.0));
    }

    #[test]
    fn what_is_missing_is_said() {
        assert!(parse("==ERROR== ERR_NVGPUCTRPERM").unwrap().is_empty());
        let without = CSV.replace("Metric Value", "Something");
        assert!(
            parse(&without)
                .unwrap_err()
                .to_string()
                .contains("Metric Value")
        );
        let lines: Vec<&str> = CSV.lines().take(7).collect();
        let error = parse(&lines.join("\n")).unwrap_err().to_string();
        assert!(
            error.contains("tw_standard_scores") && error.contains("no lts"),
            "{error}"
        );
        let wrong = CSV.replace("\"12\"", "\"n/a\"");
        assert!(parse(&wrong).unwrap_err().to_string().contains("n/a"));
    }

    #[test]
    fn the_metrics_asked_for_are_those_read() {
        let asked = ARGUMENTS[6];
        for metric in [DRAM_READ, DRAM_WRITTEN, L2_READ, L2_WRITTEN, RECEIVED] {
            assert!(asked.split(',').any(|one| one == metric));
        }
    }
}
