//! `QueuePairBuilder::direct` on devices that lack the direct data path.

use tokio_rdma::types::{DataPath, DirectConfig, ScatterToCqe};
use tokio_rdma::{CompletionMode, CompletionQueue, QueuePair};

use crate::common::Setup;

#[test]
fn other_data_paths_refuse_all_but_the_default_config() {
    let setup = Setup::new();
    let pd = setup.a.protection_domain().unwrap();
    let queue = CompletionQueue::new(&setup.a, CompletionMode::Event).unwrap();
    let build = |config| QueuePair::builder(&pd, &queue).direct(config).build();
    build(DirectConfig::default()).unwrap();
    let other = DirectConfig::default().scatter_to_cqe(ScatterToCqe::Off);
    for config in [other, DirectConfig::default().blue_flame(false)] {
        let built = build(config);
        if setup.a.attr().data_path == DataPath::Direct {
            built.unwrap();
            continue;
        }
        assert_eq!(
            built.unwrap_err().to_string(),
            "unsupported: scatter to CQE and BlueFlame are chosen on the direct data path of an \
             mlx5 adapter only; omit the setting"
        );
    }
}
