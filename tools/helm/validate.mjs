// Hold custom resources, a JSON array on standard input, against the operators' own schemas: says of each
// whether it is valid, and exits with 1 if one is not. tools/setup_deploy.sh puts it beside the packages.
import { readFileSync } from "node:fs";
import * as keda from "@kubernetes-models/keda/keda.sh/v1alpha1";
import * as monitoring from "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1";

const kinds = { "keda.sh/v1alpha1": keda, "monitoring.coreos.com/v1": monitoring };
for (const resource of JSON.parse(readFileSync(0, "utf8"))) {
  const name = `${resource.kind} ${resource.metadata.name}`;
  try {
    new kinds[resource.apiVersion][resource.kind](resource).validate();
    console.log(`${name} is valid`);
  } catch (error) {
    console.log(`${name}: ${error.message}`);
    process.exitCode = 1;
  }
}
