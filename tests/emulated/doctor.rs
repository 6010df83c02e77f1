//! The doctor's report of the data path, as text and as JSON.

use tokio_rdma::doctor::Examination;

use emulated_connectx::this_program;

use super::{COMPRESSION, POST};

#[allow(dead_code, reason = "only the conversion to JSON is used")]
#[path = "../../examples/doctor.rs"]
mod example;

/// Makes a process print its report.
const PRINTS: &str = "TOKIO_RDMA_PRINTS_REPORT";

// Whether the device works depends on the machine's speed: the doctor waits for two seconds.
#[test]
fn doctor_opens_the_device() {
    let report = Examination::new().device("mlx5_0").run();
    let works = report.devices.iter().any(|device| device.works());
    if std::env::var_os(PRINTS).is_some() {
        println!("\n{report}\n{:#}", example::report_as_json(&report, works));
    } else {
        assert!(report.devices.iter().any(|device| device.attr.is_some()), "{report}");
    }
}

/// Returns the doctor's report in a process with these settings.
fn report_with(settings: &[(&str, &str)]) -> String {
    let mut command = this_program();
    command.args(["--exact", "emulated::doctor::doctor_opens_the_device"]);
    command.arg("--nocapture").env_remove(POST).env(PRINTS, "1");
    let output = command.envs(settings.iter().copied()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
    text
}

#[track_caller]
fn check(settings: &[(&str, &str)], lines: &[&str]) {
    let report = report_with(settings);
    for &line in lines {
        assert!(report.lines().any(|found| found.trim() == line), "{line}\n{report}");
    }
}

#[test]
fn doctor_prints_the_data_path() {
    for (settings, text) in [
        (&[][..], "direct, without libibverbs"),
        (&[(POST, "direct")], "direct, without libibverbs"),
        (&[(POST, "extended")], "libibverbs (ibv_wr_post)"),
        (&[(POST, "chain")], "libibverbs (ibv_post_send)"),
        (&[("MLX5_QP_SIGNATURE", "1")], "libibverbs (ibv_wr_post)"),
    ] {
        let (line, json) =
            (format!("{:<26}{text}", "data path"), format!("\"data_path\": \"{text}\","));
        check(settings, &[&line, &json]);
    }
}

#[test]
fn doctor_prints_why_a_data_path_is_refused() {
    let failed = "failed to open device \"mlx5_0\"";
    let signed = format!(
        "{failed}: direct data path (needs MLX5_QP_SIGNATURE to be unset): Operation not supported \
         (os error 95)"
    );
    let unknown = format!(
        "{failed}: TOKIO_RDMA_POST (must be direct, extended or chain): Invalid argument (os error \
         22)"
    );
    let compression = format!(
        "{failed}: TOKIO_RDMA_CQE_COMPRESSION (must be 0 or 1): Invalid argument (os error 22)"
    );
    let unset =
        "-> unset TOKIO_RDMA_POST; the device is then posted to directly if that is possible";
    let correct = "-> set TOKIO_RDMA_CQE_COMPRESSION to 0 or 1, or unset it";
    for (settings, error, advice) in [
        (&[(POST, "direct"), ("MLX5_QP_SIGNATURE", "1")][..], signed, unset),
        (&[(POST, "fast")], unknown, unset),
        (&[(COMPRESSION, "2")], compression, correct),
    ] {
        let line = format!("{:<26}{error}", "error");
        let json = format!("\"error\": {error:?},");
        check(settings, &["mlx5_0: DOES NOT WORK", &line, &json, advice, "\"works\": false"]);
    }
}
